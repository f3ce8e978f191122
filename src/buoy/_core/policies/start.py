"""Start a policy at a given scale, on the host or on the device."""

import inspect
import math
from dataclasses import replace
from typing import Any

from buoy._core.errors import PolicyError
from buoy._core.ops import PLAIN, Precision, Scalar, ops_of, register_backends
from buoy._core.policies.policy import Policy

__all__ = ["bounded", "exponent_of", "init_takes_scale", "started"]


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


def init_takes_scale(policy: Any) -> bool:
    """Return whether the policy's `init` takes the optional keyword `scale`."""
    return "scale" in inspect.signature(policy.init).parameters


def started(policy: Policy, scale: Scalar) -> Any:
    """Return the initial state of any policy at this scale.

    A policy whose `init` has no keyword `scale` is started through its field
    `init_scale`, which needs a plain number.

    Example:
        >>> from buoy._core.policies.static import Static
        >>> started(Static(), 8.0)
        StaticState(scale=8.0)
    """
    if init_takes_scale(policy):
        return policy.init(scale=scale)  # type: ignore[call-arg]
    name = type(policy).__name__
    if ops_of(scale) is not PLAIN:
        message = (
            f"{name} cannot start at a scale that is on a device: its `init` takes no "
            "keyword `scale`. Add it, or set the scale from a plain number."
        )
        raise PolicyError(message)
    try:
        return replace(policy, init_scale=scale).init()  # type: ignore[type-var]
    except TypeError as error:
        message = (
            f"{name} cannot start at {scale!r}: its `init` takes no keyword `scale`, "
            "and it has no field `init_scale`."
        )
        raise PolicyError(message) from error
