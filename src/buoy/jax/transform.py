"""Loss scaling as an optax transformation around another one."""

from typing import Any

import jax
import optax

from buoy._backends.lifting import lift
from buoy._core.bounds import initial
from buoy._core.policies.policy import Policy
from buoy._core.policies.registry import policy as policy_of
from buoy._core.ring import LENGTH
from buoy._core.warn import warn
from buoy.jax import leaves
from buoy.jax.agree import axes_of
from buoy.jax.apply import Options, advance
from buoy.jax.errors import OptionError
from buoy.jax.find import holds_state
from buoy.jax.flax import register_with_flax
from buoy.jax.masters import keeps_masters
from buoy.jax.state import LossScaledState, initial_state, make_plan

__all__ = ["loss_scaled"]


def loss_scaled(
    inner: optax.GradientTransformation,
    policy: str | Policy = "headroom",
    *,
    max_norm: float | None = None,
    axis_name: Any = None,
    measure_amax: bool = False,
    history: int = LENGTH,
) -> optax.GradientTransformationExtraArgs:
    """Unscale, check and clip gradients, and apply them if they are finite.

    It takes the gradients of `buoy.jax.value_and_grad`, which are multiplied by
    `scale_of(opt_state)`.  If one of them is not finite, the update is zero and the
    inner state does not change.  The policy sets the next scale.  `max_norm` clips by
    the global norm in the same pass.  `axis_name` is needed only inside `shard_map` and
    `pmap`: the devices along it decide together.  `measure_amax` measures the largest
    gradient of every step, for replay, even where the policy does not need it.
    `history` is the number of steps kept for `last_step` and recorders.

    Pass `value=loss` to `update`: some policies use it, and verdicts are more precise.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> tx = loss_scaled(optax.sgd(0.5), "static")
        >>> params = {"w": jnp.ones(2)}
        >>> state = tx.init(params)
        >>> updates, state = tx.update({"w": jnp.full(2, 1024.0)}, state, params)
        >>> updates["w"]
        Array([-0.5, -0.5], dtype=float32)
    """
    options = _checked(inner, policy, max_norm, axis_name, history)._replace(
        measure_amax=measure_amax
    )

    def init(params: optax.Params) -> LossScaledState:
        return _init(options, params)

    def update(
        updates: optax.Updates,
        state: LossScaledState,
        params: optax.Params | None = None,
        *,
        value: Any = None,
        **extra: Any,
    ) -> tuple[optax.Updates, LossScaledState]:
        if value is not None:
            extra["value"] = value
        updates, after = advance(options, updates, state, params, extra)
        return updates, register_with_flax(after)

    return optax.GradientTransformationExtraArgs(init, update)


def _checked(
    inner: Any, policy: Any, max_norm: Any, axis_name: Any, history: Any
) -> Options:
    if not hasattr(inner, "init") or not hasattr(inner, "update"):
        message = (
            "`loss_scaled` wraps an optax transformation such as `optax.adamw(1e-3)`, "
            f"got {inner!r}."
        )
        raise OptionError(message)
    if not _is_norm(max_norm):
        raise OptionError(f"`max_norm` must be above 0 or None, got {max_norm!r}.")
    if type(history) is not int or history < 1:
        raise OptionError(
            f"`history` must be a whole number of steps, got {history!r}."
        )
    made = policy_of(policy)
    axes = axes_of(axis_name)
    make_plan(made, axes, ())  # raises here, not under jit, for an unhashable policy
    return Options(optax.with_extra_args_support(inner), made, max_norm, axes, history)


def _is_norm(max_norm: Any) -> bool:
    """Return whether `max_norm` is None, a positive number or a tracer."""
    if max_norm is None or isinstance(max_norm, jax.core.Tracer):
        return True
    return isinstance(max_norm, (int, float, jax.Array)) and bool(max_norm > 0)


def _init(options: Options, params: optax.Params) -> LossScaledState:
    leaves.check_floats(params, "parameter")
    masters = keeps_masters(jax.eval_shape(options.inner.init, params))
    if not masters:
        _warn_of_halves(params)
    inner = options.inner.init(params if masters else leaves.widen_fp16(params))
    if holds_state(inner):
        message = (
            "`loss_scaled` is inside another `loss_scaled`: gradients would be "
            "unscaled twice. Wrap the whole transformation once, on the outside."
        )
        raise OptionError(message)
    scaling = lift(options.policy, initial(options.policy), "jax")
    plan = make_plan(options.policy, options.axes, leaves.names_of(params))
    return register_with_flax(initial_state(scaling, inner, options.history, plan))


def _warn_of_halves(params: optax.Params) -> None:
    flat = jax.tree.leaves(params)
    halves = [
        name
        for name, leaf in zip(leaves.names_of(params), flat, strict=True)
        if leaves.is_half(leaf)
    ]
    if halves:
        warn(
            f"{len(halves)} parameters are float16, the first is `{halves[0]}`: "
            "updates smaller than 1/2048 of a weight are rounded away. Keep float32 "
            "masters with `loss_scaled(buoy.jax.master_weights(inner))`, or keep the "
            "parameters in float32 and cast them in the loss function.",
        )
