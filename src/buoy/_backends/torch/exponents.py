"""Histograms of gradient exponents, on their device, without a host read.

The exponent is a bit field of a float32.  Large tensors are sampled with a stride: a
share of one half then has a standard deviation of 0.4 percentage points, whatever the
tensor's size, and that of the whole model a far smaller one.
"""

from collections.abc import Sequence

import torch

from buoy._backends import torch as backend
from buoy._core.feed import BINS

__all__ = ["SAMPLE", "exponents"]

SAMPLE = 2**14  # at least so many elements of a tensor are counted
_TOTAL = 2**21  # of all tensors together, if that is more


def exponents(grads: Sequence[torch.Tensor], turn: int = 0) -> torch.Tensor:
    """Count each tensor's elements by float32's exponent field.  int32 [tensors, 256].

    `turn` moves the sample, so that successive calls count other elements.

    Example:
        >>> counted = exponents([torch.tensor([0.0, 1.0, -1.5, 2.0])])
        >>> counted[0, 0].item(), counted[0, 127].item(), counted[0, 128].item()
        (1, 2, 1)
    """
    home = grads[0].device
    sample = max(SAMPLE, _TOTAL // len(grads))
    fields = [
        _fields(backend.local(grad), turn, sample).to(home, non_blocking=True)
        + BINS * index
        for index, grad in enumerate(grads)
    ]
    places = torch.cat(fields)
    counted = torch.zeros(len(grads) * BINS, dtype=torch.int32, device=home)
    ones = torch.ones((), dtype=torch.int32, device=home).expand(places.shape)
    return counted.scatter_add_(0, places, ones).view(len(grads), BINS)


def _fields(grad: torch.Tensor, turn: int, sample: int) -> torch.Tensor:
    flat = grad.detach().reshape(-1)
    # Odd: an even stride would sample single columns of most matrices.
    stride = max(flat.numel() // sample, 1) | 1
    if stride > 1 and stride * sample > flat.numel():
        stride -= 2
    some = flat[turn % stride :: stride] if stride > 1 else flat
    bits = some.to(torch.float32).contiguous().view(torch.int32)
    return ((bits >> 23) & 0xFF).long()
