"""Pass the loss to the policy before it is scaled (`Policy.foresee`)."""

from typing import Any

import jax
import jax.numpy as jnp

from buoy._backends.jax import ops
from buoy._core import bounds
from buoy._core.formats import FLOAT32_MAX
from buoy._core.policies.policy import Policy
from buoy.jax.agree import largest

__all__ = ["agreed", "foreseen", "single"]

_OPS = ops()


def agreed(loss: Any, axes: tuple[Any, ...] | None) -> jax.Array | None:
    """Return the loss as a number; over several devices, the largest magnitude."""
    if loss is None:
        return None
    number = jax.lax.stop_gradient(jnp.asarray(loss)).astype(jnp.float32)
    number = jnp.mean(number) if number.ndim else number
    if not axes:
        return number
    highest, lowest = largest([number, -number], axes)
    return jnp.where(highest >= lowest, highest, -lowest)


def foreseen(policy: Policy, scaling: Any, loss: jax.Array | None) -> Any:
    """Return the policy's state for this step's backward pass."""
    if loss is None or "loss" not in policy.wants:
        return scaling
    return bounds.foreseen(policy, scaling, loss, ops=_OPS)


def single(scale: Any) -> jax.Array:
    """Return the scale in float32, and finite.

    Presets that keep a Python float may exceed float32's range.
    """
    return jnp.minimum(jnp.asarray(scale), FLOAT32_MAX).astype(jnp.float32)
