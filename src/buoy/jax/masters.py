"""Float32 masters of half-precision parameters, for any optax transformation."""

from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import optax

from buoy.jax.errors import StructureError
from buoy.jax.leaves import dtype_of

__all__ = ["MasterState", "keeps_masters", "master_weights"]


@dataclass(frozen=True, slots=True)
class MasterState:
    """The masters, with None for parameters that need none, and the inner state."""

    masters: Any
    inner: Any


jax.tree_util.register_dataclass(
    MasterState, data_fields=[f.name for f in fields(MasterState)], meta_fields=[]
)


def master_weights(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Update float32 copies of FP16 and BF16 parameters.

    An FP16 weight loses updates smaller than 1/2048 of itself, a BF16 weight those
    smaller than 1/256; its float32 copy, the master, keeps them.  After
    `optax.apply_updates`, each parameter is its rounded master.  The inner state is
    float32 too.  Use it inside or around `loss_scaled`.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> tx = master_weights(optax.sgd(1e-4))
        >>> w = jnp.ones(1, jnp.float16)
        >>> state = tx.init(w)
        >>> for _ in range(10):
        ...     updates, state = tx.update(jnp.ones(1), state, w)
        ...     w = optax.apply_updates(w, updates)
        >>> w
        Array([0.999], dtype=float16)
    """
    wrapped = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> MasterState:
        masters = jax.tree.map(_master, params)
        return MasterState(masters, wrapped.init(_filled(masters, params)))

    def update(
        updates: optax.Updates,
        state: MasterState,
        params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, MasterState]:
        if params is None:
            message = (
                "`master_weights` needs the parameters: call `tx.update(grads, state, "
                "params)`. The update is the difference between a rounded master and "
                "its parameter."
            )
            raise StructureError(message)
        wide = _filled(state.masters, params)
        grads = jax.tree.map(_wide_as, updates, wide)
        moved, inner_state = wrapped.update(grads, state.inner, wide, **extra)
        after = optax.apply_updates(wide, moved)
        masters = jax.tree.map(
            lambda param, new: new if _is_half(param) else None, params, after
        )
        return _differences(params, after, moved), MasterState(masters, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def keeps_masters(state: Any) -> bool:
    """Return whether an inner state holds masters."""
    found = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, MasterState))
    return any(isinstance(leaf, MasterState) for leaf in found)


def _is_half(leaf: Any) -> bool:
    return dtype_of(leaf) in (jnp.float16, jnp.bfloat16)


def _master(param: Any) -> Any:
    return jnp.asarray(param, jnp.float32) if _is_half(param) else None


def _filled(masters: Any, params: optax.Params) -> Any:
    """Replace parameters by their masters."""
    return jax.tree.map(
        lambda param, master: param if master is None else master,
        params,
        masters,
        is_leaf=lambda x: x is None,
    )


def _wide_as(grad: Any, param: Any) -> Any:
    return grad.astype(jnp.float32) if _is_half(grad) and not _is_half(param) else grad


def _differences(params: optax.Params, after: Any, moved: Any) -> Any:
    def difference(param: Any, new: Any, step: Any) -> Any:
        if not _is_half(param):
            return step
        # A master may leave FP16's range; its parameter stays at the largest number.
        top = jnp.finfo(param.dtype).max.astype(jnp.float32)  # type: ignore[no-untyped-call]
        rounded = jnp.clip(new, -top, top).astype(param.dtype)
        return rounded.astype(jnp.float32) - param.astype(jnp.float32)

    return jax.tree.map(difference, params, after, moved)
