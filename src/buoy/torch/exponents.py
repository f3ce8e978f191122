"""Count gradients by binade, on their device, without reading one.

The exponent lies open in a float32's bits.  Large tensors are sampled at a regular
distance: a share of one half is then known within 0.4 percentage points (one standard
deviation), whatever the tensor's size, and that of the whole model far better.
"""

from collections.abc import Sequence

import torch

from buoy._backends import torch as backend

__all__ = ["BINS", "SAMPLE", "exponents"]

BINS = 256  # 0: zeros (and float32's subnormals), 255: inf and NaN, e: 2^(e-127)
SAMPLE = 2**14  # elements of a tensor that are counted at least, if it has as many
_TOTAL = 2**21  # of all tensors together, if that is more


def exponents(grads: Sequence[torch.Tensor], turn: int = 0) -> torch.Tensor:
    """Count each tensor's elements by float32's exponent field.  int32 [tensors, 256].

    `turn` moves the sample, so that successive looks see other elements.

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
    # Odd, or it would walk along the columns of most matrices.
    stride = max(flat.numel() // sample, 1) | 1
    if stride > 1 and stride * sample > flat.numel():
        stride -= 2
    some = flat[turn % stride :: stride] if stride > 1 else flat
    bits = some.to(torch.float32).contiguous().view(torch.int32)
    return ((bits >> 23) & 0xFF).long()
