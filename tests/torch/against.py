"""What our scaler is held against: torch's own, and the errors that it raises."""

import pytest
import torch

from buoy import BuoyError
from buoy.torch import GradScaler

Stock = torch.amp.GradScaler
EVENTS = ["ok", "inf", "ok", "ok", "nan", "nan", "ok", "ok", "ok", "-inf", "ok", "ok"]


def both(**arguments):
    """Make one scaler of each class."""
    return GradScaler("cpu", **arguments), Stock("cpu", **arguments)


def expect(error, builtin, *words):
    """Expect an error that is ours, is the builtin that torch raises, and says this."""
    assert issubclass(error, BuoyError)
    assert issubclass(error, builtin)
    return pytest.raises(error, match=".*".join(words))
