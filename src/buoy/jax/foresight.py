"""Pass the loss to the policy before it is scaled (`Policy.foresee`)."""

from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp

from buoy._backends.jax import ops
from buoy._core import bounds
from buoy._core.formats import FLOAT32_MAX
from buoy._core.policies.policy import Policy
from buoy._core.state import State
from buoy.jax.agree import furthest, largest

__all__ = ["foreseen", "number_of", "single"]

_OPS = ops()


def number_of(loss: Any) -> jax.Array:
    """Return the loss as one number, the mean if there are several.  float32 []."""
    number = jax.lax.stop_gradient(jnp.asarray(loss)).astype(jnp.float32)
    return jnp.mean(number) if number.ndim else number


def foreseen(
    policy: Policy, scaling: State, loss: Any, axes: tuple[Hashable, ...] | None
) -> Any:
    """Return the policy's state for this step's backward pass.

    Only policies that look ahead need the loss before it, in a collective of its own.
    """
    if loss is None or "loss" not in policy.wants:
        return scaling
    number = number_of(loss)
    if axes:
        number = furthest(*largest([number, -number], axes))
    return bounds.foreseen(policy, scaling, number, ops=_OPS)


def single(scale: Any) -> jax.Array:
    """Return the scale in float32, and finite.

    Presets that keep a Python float may exceed float32's range.
    """
    return jnp.minimum(jnp.asarray(scale), FLOAT32_MAX).astype(jnp.float32)
