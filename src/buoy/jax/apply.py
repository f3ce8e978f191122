"""One step: check the gradients, move the scale, apply or skip the update."""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from buoy._backends.jax import ops
from buoy._core.ops import Scalar
from buoy._core.policies.policy import Policy
from buoy._core.ring import NOT_MEASURED, Measured, line_of
from buoy._core.state import Seen, State
from buoy._core.step import Measurement, as_wanted, decide, schedule
from buoy.jax import foresight, leaves
from buoy.jax.agree import check_axes, may_branch
from buoy.jax.carried import check_read
from buoy.jax.clipped import held
from buoy.jax.errors import NoScaleError, StructureError
from buoy.jax.masters import keeps_masters
from buoy.jax.skip import apply_or_skip
from buoy.jax.state import LossScaledState, check_state
from buoy.jax.survey import Survey, agreed, measure, survey

__all__ = ["Options", "advance"]

_OPS = ops()


class Options(NamedTuple):
    """The arguments of `loss_scaled`, checked."""

    inner: optax.GradientTransformationExtraArgs
    policy: Policy
    max_norm: float | None
    axes: tuple[Hashable, ...] | None
    history: int
    measure_amax: bool = False  # in every step

    @property
    def wanted(self) -> dict[str, Measurement]:
        """What is measured for the policy."""
        return schedule(self.policy.wants, clips=self.max_norm is not None)


class _Scales(NamedTuple):
    """The scale of the gradients, and the scale of their backward pass."""

    inverse: jax.Array  # float32 []: 1 / the planned scale, that of the gradients
    lowered: jax.Array  # float32 []: the foreseen scale / the planned one


def advance(
    options: Options,
    grads: optax.Updates,
    state: LossScaledState,
    params: optax.Params,
    extra: dict[str, Any],
) -> tuple[optax.Updates, LossScaledState]:
    """Return the updates and the next state."""
    _check(options, grads, state, params)
    policy = options.policy
    loss = extra.get("value")
    before = foresight.foreseen(policy, state.scaling, loss, options.axes)
    scales = _scales(state.scaling, before)
    flat = jax.tree.leaves(grads)
    check_read(state.plan, flat)
    branch = may_branch(flat)
    looked = _look(options, flat, loss, scales, state.steps, branch=branch)
    seen = _seen(looked, scales, options, state.steps)
    norm = looked.norm * scales.inverse
    applied, after, factor = decide(
        policy,
        before,
        seen,
        inverse=scales.inverse,
        norm=norm,
        max_norm=options.max_norm,
        ops=_OPS,
    )
    updates, inner = apply_or_skip(
        lambda grads, inner, params: _inner(
            options, _multiplied(grads, factor), inner, params, extra
        ),
        applied,
        (grads, state.inner, params),
        branch=branch,
    )
    sizes = {"norm": Measured(_no_nan(norm)), "amax": _amax(looked, scales)}
    after = held(after, state, sizes)
    line = line_of(
        before.scale,
        after.scale,
        applied,
        **sizes,
        loss=NOT_MEASURED if looked.loss is None else Measured(looked.loss),
    )
    return updates, LossScaledState(
        scaling=after,
        inner=inner,
        steps=state.steps + 1,
        rows=_written(state.rows, _stacked(line), state.steps),
        bad=_written(state.bad, looked.bad, state.steps),
        plan=state.plan,
    )


def _check(
    options: Options, grads: optax.Updates, state: Any, params: optax.Params
) -> None:
    if not isinstance(state, LossScaledState):
        message = (
            "The state passed to `update` is not a state of `loss_scaled`, got "
            f"{type(state).__name__}. Pass what `init` or the last `update` of this "
            "transformation returned."
        )
        raise NoScaleError(message)
    if type(state.scaling) is not type(options.policy.init()):
        message = (
            f"The state holds a {type(state.scaling).__name__}, but the policy is "
            f"{type(options.policy).__name__}. The state was made by another policy: "
            "start from `init`, or build `loss_scaled` with the policy of the "
            "checkpoint."
        )
        raise StructureError(message)
    if state.plan.policy != options.policy:
        message = (
            f"The state was made with {state.plan.policy!r}, but this `loss_scaled` "
            f"uses {options.policy!r}. Gradients would be scaled by one and unscaled "
            "by the other. Start from `init`, or build `loss_scaled` with the policy "
            "of the state."
        )
        raise StructureError(message)
    check_state(state)
    leaves.check_floats(grads, "gradient")
    if params is not None:
        leaves.check_same(grads, params)
    names = leaves.names_of(grads)
    count = len(state.plan.names)
    if len(names) != count or (params is None and names != state.plan.names):
        raise StructureError(leaves.difference(names, state.plan.names))
    named = dict(zip(names, jax.tree.leaves(grads), strict=True))
    check_axes(named, options.axes, "gradient")


def _scales(planned: State, foreseen: State) -> _Scales:
    """Return the two scales of a step.

    Gradients always have the planned scale, that of `scale_of(opt_state)`.  A backward
    pass that would overflow ran at a lower one; `value_and_grad` corrected for it.
    A scale that cannot be used, of a damaged checkpoint, makes the step a skipped one.
    """
    scale = foresight.single(planned.scale)
    usable = (planned.scale > 0.0) & (planned.scale < jnp.inf)
    inverse = jnp.where(usable, 1.0 / scale, jnp.inf)
    return _Scales(inverse, foresight.single(foreseen.scale) / scale)


def _look(
    options: Options,
    flat: Sequence[Any],
    loss: Any,
    scales: _Scales,
    steps: jax.Array,
    *,
    branch: bool,
) -> Survey:
    size = options.wanted.get("amax_log2")
    due = options.measure_amax or (size is not None and size.due(steps))
    looked = survey(flat, scales.inverse, amax=due, branch=branch)
    wants = options.policy.wants
    measured = measure(flat, scales.lowered, steps, wants, branch=branch)
    number = None if loss is None else foresight.number_of(loss)
    found = agreed(looked._replace(measured=measured, loss=number), options.axes)
    if found.amax is None or due is True:
        return found
    # Only now: NaN is sent to other devices as inf, which is an overflow.
    return found._replace(amax=jnp.where(due, found.amax, jnp.nan))


def _seen(looked: Survey, scales: _Scales, options: Options, steps: jax.Array) -> Seen:
    """Return what the policy is shown.

    With clipping, a norm beyond float32 is an overflow, too: clipped by it, all
    gradients would be 0.
    """
    finite = jnp.logical_not(jnp.any(looked.bad))
    if options.max_norm is not None:
        norm = looked.norm
        finite &= jnp.isfinite(norm) & jnp.isfinite(norm * scales.inverse)
    measured = dict(looked.measured)
    if looked.amax is not None:
        size = looked.amax * scales.lowered
        wanted = options.wanted.get("amax_log2")
        if options.measure_amax and wanted is not None:  # measured, but not to be shown
            size = jnp.where(wanted.due(steps), size, jnp.nan)
        measured["amax_log2"] = size
    loss_finite = None
    if "loss_finite" in options.policy.wants and looked.loss is not None:
        loss_finite = jnp.isfinite(looked.loss)
    return Seen(finite=finite, loss_finite=loss_finite, **as_wanted(measured, _log2))


def _log2(size: jax.Array) -> jax.Array:
    """Return log2, exact for powers of two; XLA's own is not.

    Policies compare it in steps of 1/1024: an error would change the scale.
    """
    part, whole = jnp.frexp(size)
    return (whole - 1).astype(jnp.float32) + jnp.log2(2.0 * part)


def _multiplied(grads: optax.Updates, factor: jax.Array) -> optax.Updates:
    def multiply(grad: jax.Array) -> jax.Array:
        if grad.dtype == jnp.float16:  # unscaled values do not fit
            grad = grad.astype(jnp.float32)
        if leaves.is_narrow(grad):
            return (grad.astype(jnp.float32) * factor).astype(grad.dtype)
        return grad * factor.astype(leaves.real_of(grad))

    return jax.tree.map(multiply, grads)


def _inner(
    options: Options,
    grads: optax.Updates,
    inner: optax.OptState,
    params: optax.Params,
    extra: dict[str, Any],
) -> tuple[optax.Updates, optax.OptState]:
    if params is not None and not keeps_masters(inner):
        params = leaves.widen_fp16(params)
    updates, after = options.inner.update(grads, inner, params, **extra)
    return updates, after


def _amax(looked: Survey, scales: _Scales) -> Measured:
    """Return the largest unscaled gradient, if it was measured."""
    if looked.amax is None:
        return NOT_MEASURED
    known = jnp.logical_not(jnp.isnan(looked.amax))
    unscaled = _no_nan(looked.amax * scales.inverse)
    return Measured(jnp.where(known, unscaled, 0.0), known)


def _no_nan(number: jax.Array) -> jax.Array:
    """Replace NaN by inf.

    An overflow is not an error, but `jax_debug_nans` would stop at a NaN in the state.
    """
    return jnp.where(jnp.isnan(number), jnp.inf, number)


def _stacked(line: Sequence[Scalar]) -> jax.Array:
    """Return the numbers as one array.  float32 [numbers].

    Not by `stack`: of more than eight numbers, XLA makes a kernel of its own for it.
    """
    places = jnp.arange(len(line))
    row = jnp.zeros(len(line), jnp.float32)
    for place, number in enumerate(line):
        row = jnp.where(places == place, jnp.asarray(number, jnp.float32), row)
    return row


def _written(ring: jax.Array, row: jax.Array, steps: jax.Array) -> jax.Array:
    return ring.at[steps % len(ring)].set(row)
