"""Check and measure a list of gradients, for Keras on torch.

`buoy.torch` has its own way (`gradients`), by device and dtype and for ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch

from buoy._backends.torch import magnitude
from buoy._backends.torch.measure import small_share
from buoy._core.advance import Found
from buoy._core.formats import FLOAT32_MAX
from buoy._core.step import SMALL

__all__ = ["MEASURE", "look", "values_of"]


def values_of(grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient's values; of a sparse one those that are there."""
    return grad._values() if grad.is_sparse else grad


def look(grads: Sequence[Any], inverse: torch.Tensor) -> Found:
    """Check gradients and measure them; `inverse` is 1 / the scale that they carry."""
    sizes = torch.stack([magnitude(grad).float() for grad in grads])
    norms = [torch.linalg.vector_norm(values_of(grad).float()) for grad in grads]
    after = torch.maximum(sizes, sizes * inverse)
    bad = torch.logical_not(after <= FLOAT32_MAX)
    return Found(
        bad=bad,
        finite=bad.any().logical_not(),
        amax=sizes.max(),
        norm=torch.linalg.vector_norm(torch.stack(norms)),
    )


def _underflow(grads: Sequence[Any], lowered: torch.Tensor) -> torch.Tensor:
    """Return the share of the nonzero gradients that is small.  float32 []."""
    wide = [values_of(grad).float() for grad in grads]
    return small_share([wide], lowered.device, SMALL / lowered)


MEASURE = {"underflow": _underflow}  # besides "amax_log2", which `look` takes
