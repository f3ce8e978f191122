"""Round float32 tensors to the grid of a narrower format, held in float32.

To nearest, ties to even; subnormals kept; what is too large becomes inf, or NaN where
the format has no inf.  Where torch has a dtype and converts it fast, two conversions
are the fastest way (`benchmarks/emulate.py` prints it); elsewhere bits are.
"""

from collections.abc import Callable
from functools import partial

import torch

from buoy._core.formats import Format, number_format

__all__ = ["KERNELS", "by_bits", "by_conversion", "round_to", "rounder"]

Rounder = Callable[[torch.Tensor], torch.Tensor]

_DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8_e5m2": torch.float8_e5m2,
    "fp8_e4m3fn": torch.float8_e4m3fn,
}
KERNELS = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""Formats in which torch can compute, not only store."""

_SLOW = {"fp8_e4m3fn"}  # torch converts element by element: bits are faster
_EXPONENT = 0x7F800000  # float32's exponent field
_HALF_BIT = 0x00400000  # the first bit after it: a mantissa of 1.5


def round_to(values: torch.Tensor, number: str | Format = "fp16") -> torch.Tensor:
    """Round a float32 tensor to a format's grid.

    Example:
        >>> round_to(torch.tensor([0.1, 65519.0, 65520.0, 2.0**-25])).tolist()
        [0.0999755859375, 65504.0, inf, 0.0]
    """
    return rounder(number)(values)


def rounder(number: str | Format) -> Rounder:
    """Find the fastest way to round to a format.

    Example:
        >>> rounder("fp8_e4m3fn")(torch.tensor([17.0, 464.0, 465.0])).tolist()
        [16.0, 448.0, nan]
    """
    limits = number_format(number)
    if limits.name == "fp32":
        return _as_it_is
    if limits.name in _DTYPES and limits.name not in _SLOW:
        return by_conversion(limits)
    return by_bits(limits)


def by_conversion(limits: Format) -> Rounder:
    """Round by converting to torch's dtype and back."""
    return partial(_there_and_back, dtype=_DTYPES[limits.name])


def _as_it_is(values: torch.Tensor) -> torch.Tensor:
    return values


def _there_and_back(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return values.to(dtype).to(torch.float32)


def by_bits(limits: Format) -> Rounder:
    """Round by adding and taking away a number that pushes the last bits out.

    For formats of fewer exponent bits than float32, so that the number fits.
    It is 1.5 x 2^23 grid steps, so that float32's own rounding, to nearest
    and even, falls on the grid; its exponent is made from that of each value.
    """
    shift = 23 - limits.mantissa_bits
    lowest = (128 - limits.bias) << 23  # exponent of the smallest normal number
    highest = (limits.max_log2 // 1 + 129) * 2**23  # one above that of the largest
    beyond = 1.0 if limits.has_inf else 0.0  # 0 x inf is NaN

    def rounded(values: torch.Tensor) -> torch.Tensor:
        bits = values.view(torch.int32) & _EXPONENT
        bits.clamp_(lowest, int(highest)).add_((shift << 23) + _HALF_BIT)
        pusher = bits.view(torch.float32)
        result = (values + pusher).sub_(pusher)
        # Zero within the limits, infinite beyond: a mask would cost four times this.
        excess = (result - result.clamp(-limits.max, limits.max)).mul_(2.0**127)
        return result.add_(excess.mul_(beyond)).copysign_(values)

    return rounded
