"""Apply the inner update, or leave everything as it was.

Either by a branch or by selecting between old and new; see `may_branch`.  On a CPU the
branch is worth a fifth of the step: where both are kept to select from, XLA computes
the optimizer's moments twice.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["apply_or_skip"]

Update = Callable[[Any, Any, Any], tuple[Any, Any]]  # grads, state, params


def apply_or_skip(
    update: Update,
    applied: jax.Array,
    given: tuple[Any, Any, Any],
    *,
    branch: bool,
) -> tuple[Any, Any]:
    """Return updates and state: the inner ones, or none and the old one."""
    if branch:
        return _branched(update, applied, given)
    updates, after = update(*given)
    before = given[1]
    # Adding -0.0 is the only addition that leaves every number as it is.
    updates = jax.tree.map(
        lambda u: jnp.where(applied, u, jnp.full((), -0.0, u.dtype)), updates
    )
    return updates, jax.tree.map(lambda a, b: _select(applied, a, b), after, before)


def _branched(update: Update, applied: jax.Array, given: Any) -> tuple[Any, Any]:
    def apply(grads: Any, inner: Any, params: Any) -> Any:
        return jax.tree.map(_strong, update(grads, inner, params))

    def skip(grads: Any, inner: Any, params: Any) -> Any:
        updates, after = jax.eval_shape(apply, grads, inner, params)
        nothing = jax.tree.map(lambda u: jnp.full(u.shape, -0.0, u.dtype), updates)
        return nothing, jax.tree.map(_as_is, inner, after)

    chosen: tuple[Any, Any] = jax.lax.cond(applied, apply, skip, *given)
    return chosen


def _strong(leaf: Any) -> Any:
    """Settle a leaf's type: both sides of a branch must be of one."""
    return jax.lax.convert_element_type(leaf, jnp.asarray(leaf).dtype)


def _as_is(before: Any, after: Any) -> Any:
    return jax.lax.convert_element_type(before, after.dtype)


def _select(applied: jax.Array, after: jax.Array, before: jax.Array) -> jax.Array:
    placed = getattr(jax.typeof(after), "sharding", None)
    if placed != getattr(jax.typeof(before), "sharding", None):
        # On a mesh with explicit axes a fresh state may lie otherwise than what the
        # first update makes of it.
        before = jax.sharding.reshard(before, placed)  # type: ignore[no-untyped-call]
    return jnp.where(applied, after, before)
