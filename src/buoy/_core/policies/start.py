"""Start a policy at a given scale, on the host or on the device."""

import math

from buoy._core.errors import PolicyError
from buoy._core.ops import PLAIN, Precision, Scalar, ops_of, register_backends

__all__ = ["bounded", "exponent_of"]


def bounded(scale: Scalar, low: float, high: float, precision: Precision) -> Scalar:
    """Round a scale to the precision of a state and clamp it, without reading it.

    NaN becomes the lower bound on a device; on the host it raises.

    Example:
        >>> bounded(2.0**80, 1.0, 2.0**64, "float32") == 2.0**64
        True
    """
    register_backends()
    ops = ops_of(scale)
    if ops is PLAIN:
        real = isinstance(scale, (int, float)) and not isinstance(scale, bool)
        if not real or not 0.0 < scale < math.inf:
            message = f"`scale` must be a finite number greater than 0, got {scale!r}."
            raise PolicyError(message)
    scale = ops.cast(scale, precision)
    scale = ops.where(scale > low, scale, low)
    return ops.where(scale < high, scale, high)


def exponent_of(scale: Scalar) -> Scalar:
    """Return log2 of a scale, exact at powers of two; XLA's own may not be.

    Example:
        >>> exponent_of(0.125)
        -3.0
    """
    ops = ops_of(scale)
    exponent = ops.log2(scale)
    whole = ops.floor(exponent + 0.5)
    return ops.where(ops.exp2(whole) == scale, whole, exponent)
