"""`value_and_grad` with loss scaling.

The loss itself is never multiplied: the scale is applied to the cotangent, in the
backward pass.  So scaling cannot overflow an FP16 loss, and the returned value is
bit-identical to the unscaled loss.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from buoy.jax import foresight, leaves
from buoy.jax.agree import check_axes
from buoy.jax.carried import note_read
from buoy.jax.errors import LossError
from buoy.jax.find import find
from buoy.jax.state import LossScaledState

__all__ = ["value_and_grad"]

_LARGEST_HALF = 2.0**15  # the largest power of two that FP16 holds
_PAIR = 2  # a loss, and the data with it


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] | None = None,
    *,
    has_aux: bool = False,
    transform: Callable[..., Any] = jax.value_and_grad,
    **options: Any,
) -> Callable[..., Any]:
    """Differentiate a loss; multiply its gradients by the scale in `opt_state`.

    The returned function takes `opt_state`, then the arguments of `fun`, and returns
    the same as `jax.value_and_grad`: the unscaled loss, auxiliary data with `has_aux`,
    and the gradients times `scale_of(opt_state)`.  Gradients of FP16 parameters are
    float32.  `transform` may be `nnx.value_and_grad` or
    `equinox.filter_value_and_grad`; further options are passed on to it.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from buoy.jax import loss_scaled
        >>> opt_state = loss_scaled(optax.sgd(0.1), "static").init(jnp.ones(()))
        >>> value_and_grad(lambda w, x: w * x)(opt_state, jnp.ones(()), 3.0)
        (Array(3., dtype=float32), Array(3072., dtype=float32))
    """
    if argnums is not None:
        options["argnums"] = argnums

    def differentiate(opt_state: optax.OptState, /, *args: Any, **kwargs: Any) -> Any:
        state = find(opt_state)
        note_read(state.plan)
        if transform is jax.value_and_grad and not options.get("allow_int"):
            _check_arguments(args, argnums)

        def scaled(*args: Any, **kwargs: Any) -> Any:
            out = fun(*args, **kwargs)
            loss, aux = _split_aux(out, has_aux=has_aux)
            scale = _scale_for(loss, state)
            return _carry(loss, scale), (aux, scale)

        run = transform(scaled, has_aux=True, **options)
        (loss, (aux, scale)), grads = run(*args, **kwargs)
        grads = _at_planned_scale(grads, loss, scale, state)
        return ((loss, aux) if has_aux else loss), grads

    return differentiate


def _split_aux(out: Any, *, has_aux: bool) -> tuple[Any, Any]:
    """Return the loss and the auxiliary data."""
    pair = isinstance(out, (tuple, list)) and len(out) == _PAIR
    if has_aux and not pair:
        message = (
            "With `has_aux=True` the loss function must return a pair, the loss and "
            f"the data, got {type(out).__name__}."
        )
        raise LossError(message)
    loss, aux = out if has_aux else (out, None)
    if leaves.dtype_of(loss) is None:
        message = (
            f"The loss must be one number, got {type(loss).__name__}. If the loss "
            "function returns further data, return `(loss, data)` and pass "
            "`has_aux=True`."
        )
        raise LossError(message)
    return loss, aux


@jax.custom_jvp
def _carry(loss: jax.Array, scale: jax.Array) -> jax.Array:
    """Return the loss; its derivative is the scale."""
    del scale  # pragma: no cover - JAX runs this only where nothing is differentiated
    return loss  # pragma: no cover


@_carry.defjvp
def _carry_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    loss, scale = primals
    return loss, tangents[0] * scale.astype(jnp.asarray(loss).dtype)


def _scale_for(loss: Any, state: LossScaledState) -> jax.Array:
    """Return the scale of this backward pass."""
    plan = state.plan
    if "loss" in plan.policy.wants:
        check_axes({"loss": loss}, plan.axes, "value")
    scaling = foresight.foreseen(plan.policy, state.scaling, loss, plan.axes)
    scale = foresight.single(scaling.scale)
    if leaves.is_half(loss):
        scale = jnp.minimum(scale, _LARGEST_HALF)
    return scale


def _at_planned_scale(
    grads: optax.Updates, loss: Any, scale: jax.Array, state: LossScaledState
) -> Any:
    """Multiply gradients of a backward pass at a lower scale up to the planned one."""
    grads = leaves.widen_fp16(grads)
    if "loss" not in state.plan.policy.wants and not leaves.is_half(loss):
        return grads
    up = foresight.single(state.scaling.scale) / scale

    def one(grad: Any) -> Any:
        if grad.dtype == jax.dtypes.float0:  # of an integer, with `allow_int`
            return grad
        return grad * up.astype(leaves.real_of(grad))

    return jax.tree.map(one, grads)


def _check_arguments(args: tuple[Any, ...], argnums: Any) -> None:
    chosen = argnums if isinstance(argnums, Sequence) else (argnums or 0,)
    for index in chosen:
        if -len(args) <= index < len(args):
            leaves.check_floats(args[index], "parameter")
