"""Find the state of `loss_scaled` inside whatever holds it."""

import warnings
from typing import Any

import jax
import optax

from buoy.jax.errors import BuoyWarning, NoScaleError, SeveralScalesError
from buoy.jax.state import LossScaledState

__all__ = ["find", "scale_of"]


def scale_of(opt_state: Any) -> jax.Array:
    """Tell the scale that the next loss is multiplied by.  No device is waited for.

    `opt_state` may be any tree that holds the state of one `loss_scaled`: an
    `optax.chain`'s, a flax `TrainState`, an `nnx.Optimizer`.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from buoy.jax import loss_scaled
        >>> tx = optax.chain(loss_scaled(optax.sgd(0.1), "static"), optax.identity())
        >>> scale_of(tx.init(jnp.ones(2)))
        Array(1024., dtype=float32)
    """
    scale: jax.Array = find(opt_state).scaling.scale
    return scale


def find(tree: Any) -> LossScaledState:
    """Return the one state of `loss_scaled` in a tree, of plain arrays."""
    paths = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_ours)[0]
    found = [(path, leaf) for path, leaf in paths if _is_ours(leaf)]
    if not found:
        message = (
            f"No state of `loss_scaled` in this {type(tree).__name__}. Pass the "
            "optimizer's state, as `tx.init(params)` or `tx.update(...)` returned it; "
            "the transformation must be wrapped: `loss_scaled(optax.adamw(1e-3))`."
        )
        raise NoScaleError(message)
    if len(found) > 1:
        places = ", ".join(f"`{jax.tree_util.keystr(path)}`" for path, _ in found)
        message = (
            f"{len(found)} states of `loss_scaled` in this {type(tree).__name__}, at "
            f"{places}: which scale is meant? Pass the one part; or wrap everything "
            "in a single `loss_scaled`."
        )
        raise SeveralScalesError(message)
    _, state = found[0]
    _warn_of_accumulation(tree)
    bare: LossScaledState = jax.tree.map(_bare, state, is_leaf=_is_variable)
    return bare


def _is_ours(leaf: Any) -> bool:
    return isinstance(leaf, LossScaledState)


def _is_variable(leaf: Any) -> bool:
    return hasattr(leaf, "get_value")


def _bare(leaf: Any) -> Any:
    """Take an array out of the variable that flax's nnx wraps it in."""
    return leaf.get_value() if _is_variable(leaf) else leaf


def _warn_of_accumulation(tree: Any) -> None:
    held = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, optax.MultiStepsState))
    for leaf in held:
        if isinstance(leaf, optax.MultiStepsState) and _holds_ours(leaf):
            warnings.warn(
                "`optax.MultiSteps` stands around `loss_scaled`: it adds up scaled "
                "gradients, and after one overflow its sum is NaN for good (it clears "
                "it by multiplying by 0). Put it inside: "
                "`loss_scaled(optax.MultiSteps(inner, k))` checks every micro-batch "
                "and leaves out the bad one alone.",
                BuoyWarning,
                stacklevel=4,
            )


def _holds_ours(tree: Any) -> bool:
    return any(map(_is_ours, jax.tree.leaves(tree, is_leaf=_is_ours)))
