"""PyTorch: a drop-in replacement for `torch.amp.GradScaler`.

Example::

    from buoy.torch import GradScaler  # was: from torch.amp import GradScaler
"""

from importlib import import_module as _import_module
from typing import Any as _Any

from buoy._core.errors import (
    AbsentRankError,
    BuoyWarning,
    CallOrderError,
    DeviceModeError,
    MissingBackendError,
    OptionError,
    RankMismatchError,
    StuckError,
    StuckWarning,
)
from buoy._core.spikes import SpikeGuard
from buoy._core.watch import Stuck

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    message = (
        "`buoy.torch` needs PyTorch, which is not installed. Install it with "
        "`pip install 'buoy-amp[torch]'`."
    )
    raise MissingBackendError(message) from error

from buoy.torch.errors import Fp16ParametersError, NonfiniteNormError, StateError
from buoy.torch.features.keep_fp32 import KeptFp32, keep_fp32
from buoy.torch.features.masters import MasterWeights
from buoy.torch.hooks import Extension
from buoy.torch.outcome import LastStep
from buoy.torch.scaler import GradScaler

__all__ = [
    "AbsentRankError",
    "BuoyWarning",
    "CallOrderError",
    "DeviceModeError",
    "Extension",
    "Fp16ParametersError",
    "GradScaler",
    "KeptFp32",
    "LastStep",
    "MasterWeights",
    "NonfiniteNormError",
    "OptionError",
    "RankMismatchError",
    "ShardedGradScaler",
    "SpikeGuard",
    "StateError",
    "Stuck",
    "StuckError",
    "StuckWarning",
    "install",
    "keep_fp32",
]


def __getattr__(name: str) -> _Any:
    """Import what adapts torch's own classes on first use."""
    if name in ("ShardedGradScaler", "install"):
        return getattr(_import_module("buoy.integrations.install"), name)
    raise AttributeError(f"module 'buoy.torch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
