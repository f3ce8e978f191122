"""Logarithms in whole sixteenths: the same numbers on every backend.

Backends round `log2` differently in its last bits, and a rule that compares such
numbers would then move its scale differently.  Sixteenths, and sums of them, are exact
in float32.
"""

from buoy._core.ops import Ops, Scalar

__all__ = ["SIXTEENTH", "floor_log2"]

SIXTEENTH = 1.0 / 16.0
_LARGEST = 2.0**100  # far beyond every loss and gradient; 1 / it is a normal float32


def floor_log2(x: Scalar, ops: Ops) -> tuple[Scalar, Scalar]:
    """Return log2 of a number in sixteenths, rounded down, and whether it has one.

    Numbers outside 2^-100 .. 2^100 have none: 0, negative ones, inf and NaN.  Between
    two powers of two the logarithm is taken as linear, so the result is up to 0.15 too
    low.

    Example:
        >>> from buoy._core.ops import PLAIN
        >>> floor_log2(8.0, PLAIN), floor_log2(12.0, PLAIN)
        ((3.0, True), (3.5, True))
        >>> floor_log2(float("nan"), PLAIN)
        (0.0, False)
    """
    x = ops.cast(x, "float32")
    usable = (x > 1.0 / _LARGEST) & (x < _LARGEST)
    x = ops.where(usable, x, 1.0)
    whole = ops.floor(ops.log2(x))  # may be off by one: then the rest makes up for it
    rest = x * ops.exp2(-whole) - 1.0
    return whole + ops.floor(rest / SIXTEENTH) * SIXTEENTH, usable
