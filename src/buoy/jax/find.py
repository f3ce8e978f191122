"""Find the state of `loss_scaled` inside another tree."""

from typing import Any

import jax
import optax

from buoy.jax.carried import note_read
from buoy.jax.clipped import note_nesting
from buoy.jax.errors import NoScaleError, SeveralScalesError
from buoy.jax.flax import register_with_flax
from buoy.jax.nesting import warn_of_nesting
from buoy.jax.state import LossScaledState

__all__ = ["find", "holds_state", "scale_of"]


def scale_of(opt_state: optax.OptState) -> jax.Array:
    """Return the scale of the next loss, without waiting for the device.

    `opt_state` may be any tree that holds the state of one `loss_scaled`: an
    `optax.chain`'s, a flax `TrainState`, an `nnx.Optimizer`.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from buoy.jax import loss_scaled
        >>> tx = optax.chain(loss_scaled(optax.sgd(0.1), "static"), optax.identity())
        >>> scale_of(tx.init(jnp.ones(2)))
        Array(1024., dtype=float32)
    """
    state = find(opt_state)
    note_read(state.plan)
    scale: jax.Array = state.scaling.scale
    return scale


def find(tree: Any) -> LossScaledState:
    """Return the only state of `loss_scaled` in a tree, as plain arrays."""
    paths = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_state)[0]
    found = [(path, leaf) for path, leaf in paths if _is_state(leaf)]
    if not found:
        message = (
            f"There is no state of `loss_scaled` in this {type(tree).__name__}. Pass "
            "the optimizer's state, as `tx.init(params)` or `tx.update(...)` returned "
            "it, before the function's own arguments: "
            "`value_and_grad(loss_fn)(opt_state, params, batch)`. The transformation "
            "must be wrapped: `loss_scaled(optax.adamw(1e-3))`."
        )
        raise NoScaleError(message)
    if len(found) > 1:
        places = ", ".join(f"`{jax.tree_util.keystr(path)}`" for path, _ in found)
        message = (
            f"There are {len(found)} states of `loss_scaled` in this "
            f"{type(tree).__name__}, at {places}, but only one scale can be used. Pass "
            "the part with one of them, or wrap everything in a single `loss_scaled`."
        )
        raise SeveralScalesError(message)
    _, state = found[0]
    if warn_of_nesting(tree, _is_state):
        note_nesting(state.plan)
    bare: LossScaledState = jax.tree.map(_bare, state, is_leaf=_is_variable)
    return register_with_flax(bare)


def _is_state(leaf: Any) -> bool:
    return isinstance(leaf, LossScaledState)


def _is_variable(leaf: Any) -> bool:
    return hasattr(leaf, "get_value")


def _bare(leaf: Any) -> Any:
    """Return the array in a variable of flax's nnx."""
    return leaf.get_value() if _is_variable(leaf) else leaf


def holds_state(tree: Any) -> bool:
    """Return whether a tree holds a state of `loss_scaled`."""
    return any(map(_is_state, jax.tree.leaves(tree, is_leaf=_is_state)))
