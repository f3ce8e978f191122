"""Hold the scale where gradients are clipped while they are multiplied by it.

The structure of a state shows that other transformations get scaled gradients, but not
whether they clip them.  So the plans of such states are noted while functions are
traced, and only their steps compare sizes with those in the log: clipping makes one
number of many.  A policy that follows the size of such gradients would raise the scale
without end.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from buoy._core.clipped import ENOUGH
from buoy._core.ring import COLUMNS, Measured
from buoy._core.state import stores_scale
from buoy.jax.state import LossScaledState, Plan

__all__ = ["held", "note_nesting"]

_EXACT = 2e-5  # a threshold's relative error
_NESTED: set[int] = set()  # digests of plans


def note_nesting(plan: Plan) -> None:
    """Note that other transformations get the scaled gradients of such a state."""
    _NESTED.add(plan.digest)


def held(after: Any, state: LossScaledState, sizes: Mapping[str, Measured]) -> Any:
    """Return the policy's next state; with clipped gradients, its scale does not rise.

    `sizes` are the unscaled "norm" and "amax" of this step.  Gradients are clipped if
    one of them, multiplied by the scale, is the same number as in two steps of the log.
    """
    plan = state.plan
    follows = "amax_log2" in plan.policy.wants
    if plan.digest not in _NESTED or not follows or not stores_scale(after):
        return after
    scale = state.scaling.scale
    clipped = jnp.zeros((), bool)
    for name, size in sizes.items():
        clipped |= _is_threshold(state.rows, name, size, scale)
    rises = clipped & (after.scale > scale)
    return replace(after, scale=jnp.where(rises, scale, after.scale))


def _is_threshold(
    rows: jax.Array, name: str, size: Measured, scale: jax.Array
) -> jax.Array:
    """Return whether enough steps have this scaled size.  bool []."""
    column = dict(zip(COLUMNS, rows.T, strict=True))
    now: jax.Array = size.number * scale
    usable = (now > 0.0) & jnp.isfinite(now)
    known = (column["applied"] > 0.0) & (column[f"has_{name}"] > 0.0)
    near = jnp.abs(column[name] * column["scale"] - now) <= _EXACT * now
    enough = jnp.sum(known & near) >= ENOUGH - 1
    return jnp.asarray(size.known) & usable & enough
