"""One optimizer's step, from its gradients to the record of what became of it.

    inspect     reads the gradients once; nothing is written
    clip        decides on one factor, which unscales and clips
    write       multiplies the gradients by it, unless the optimizer does
    unscale     the other road, without clipping: one kernel checks and multiplies
    take        applies the step, or skips it, in one of three ways (`optimizers`)

A step is skipped where `Pending.flag` is above 0: `inspect` raises it for gradients
that are not finite, `fail_where` and `skip_where` for other reasons.

Ranks agree on what they found as late as possible, once for each optimizer (`agree`):
in `clip`, as the norm is that of all ranks; else in `take`, before anything is applied;
or in `update`, if the optimizer did not step.  By then it is known whether a rank clips
gradients that it has unscaled before, so ranks that do different things get an error
instead.  Only the flags of sharded gradients are agreed on in `unscale`.
"""

from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from buoy._backends import torch as backend
from buoy._backends.torch.gradients import (
    Gathered,
    gather,
    multiply_,
    parameters_of,
)
from buoy._backends.torch.inspection import AMAX, inspect
from buoy._core.errors import OptionError
from buoy._core.verdicts import Verdict
from buoy.torch import errors, optimizers
from buoy.torch.freshness import Freshness
from buoy.torch.hooks import Scaler
from buoy.torch.pending import Pending
from buoy.torch.scale import SMALLEST, Number, Plan, Scale

__all__ = [
    "agree",
    "check_call",
    "clip",
    "conclude",
    "gather_gradients",
    "inspect_gradients",
    "inspect_if_due",
    "may_overflow",
    "measure_norm",
    "recheck",
    "refuse_without_gradients",
    "take",
    "unscale",
    "write",
]

_SMALLEST_FLOAT = 2.0**-149
_SELDOM = 256  # steps between two looks for gradients that are all zero


def check_call(scaler: Scaler, pending: Pending, method: str) -> None:
    """Raise if `method` may not be called on these gradients now.

    Forgets an inspection whose result is not in use.
    """
    if pending.stage is OptState.STEPPED:
        late = errors.unscale_after_step(method)
        raise errors.step_twice() if method == "step" else late
    if len(scaler._per_optimizer_states) > 1 and _is_alias(scaler, pending):
        raise errors.unscaled_elsewhere()
    if pending.freshness is None:
        return
    if pending.stage is OptState.READY and pending.factor is None:
        pending.freshness = None
        pending.survey = None
    elif pending.freshness.outdated():
        raise errors.changed(method)


def _is_alias(scaler: Scaler, pending: Pending) -> bool:
    """Return whether another optimizer's gradients, inspected, are the same.

    After `zero_grad`, the gradients of a finished step do not count, nor where the
    optimizer has left them scaled.
    """
    if pending.gathered is not None:
        return False
    mine = {id(param.grad) for param in parameters_of(pending.optimizer)}
    for other in scaler._per_optimizer_states.values():
        if other.gathered is None or mine.isdisjoint(map(id, other.gathered.held)):
            continue
        still_scaled = other.handed_over and not optimizers.unscales_in_place(
            other.optimizer
        )
        if other.outcome is None:
            return True
        if other.outcome.is_unchanged() and not still_scaled:
            return True
    return False


# -- inspect ---------------------------------------------------------------------------


def gather_gradients(
    scaler: Scaler, pending: Pending, *, summed: bool = False, allow_fp16: bool
) -> Gathered:
    """Collect the gradients that are about to be inspected; raise for unusable ones."""
    optimizer = pending.optimizer
    scaler._fp16.prepare(optimizer, scaler._names)
    scale = scaler._loss_scale
    home = None if scale.tensor is None else scale.tensor.device
    pending.measured = {} if home is None else scaler._iteration.findings(home)
    for hook in scaler._hooks.before_inspect:
        hook(pending)
    gathered = gather(optimizer, summed=summed)
    pending.gathered = gathered
    pending.freshness = Freshness(optimizer, gathered)
    if not gathered.distinct:
        raise errors.shared_gradient(scaler._names.of(optimizer, gathered.params))
    if gathered.sharded and not scaler._ranks.several:
        raise OptionError(errors.ALONE_WITH_SHARDS)
    if gathered.half:
        scaler._fp16.check(optimizer, scaler._names, allow=allow_fp16)
    return gathered


def inspect_gradients(
    scaler: Scaler,
    scale: Scale,
    pending: Pending,
    *,
    inverse: torch.Tensor | None = None,
    order: float | None = None,
) -> None:
    """Read gathered gradients once, and measure what the policy wants.

    `inverse` is what they will be multiplied by, 1 / scale by default; `order` is that
    of the norm, None for no norm.
    """
    gathered: Any = pending.gathered
    inverse = scale.inverse if inverse is None else inverse
    clips = order is not None and order >= 1.0
    pending.wanted = scale.due(clips=clips)
    wanted = {*pending.wanted}
    if order is None and _zeros_due(scaler, scale):
        wanted.add(AMAX)
    survey = inspect(
        gathered,
        inverse,
        order=order,
        wanted=wanted,
        may_overflow=may_overflow(scale, inverse),
        may_read=scale.may_read,
    )
    pending.survey = survey
    pending.agreed = False
    pending.measured |= survey.measured
    pending.flags = {} if survey.empty else {scale.device: survey.found}
    for hook in scaler._hooks.inspected:
        hook(pending)


def may_overflow(scale: Plan | Scale, inverse: torch.Tensor) -> bool:
    """Return whether multiplying by `inverse` may overflow, as far as the host knows.

    Libraries may unscale with a number of their own.
    """
    if not isinstance(scale, Plan) and inverse is scale.inverse:
        return scale.may_overflow
    number = backend.known(inverse)
    return number is None or not number <= 1.0


def inspect_if_due(
    scaler: Scaler, scale: Scale, pending: Pending, inverse: torch.Tensor
) -> None:
    """Inspect gradients that are about to be unscaled, if that is due."""
    due = scale.due(clips=False) or scaler._hooks.inspected
    if due or _zeros_due(scaler, scale):
        inspect_gradients(scaler, scale, pending, inverse=inverse)


def _zeros_due(scaler: Scaler, scale: Scale) -> bool:
    """Return whether to look for gradients that are all zero, which nobody asked for.

    At steps 16, 32, 64, ... and at every 256th; once zeros were found, at every step.
    Not with several ranks: the part of one rank may be zero.
    """
    steps = scale.turn + 1
    is_power_of_two = steps & (steps - 1) == 0
    due = (
        scaler._log.watch.found_zeros
        or steps % _SELDOM == 0
        or (is_power_of_two and steps > 8)
    )
    return due and not scaler._ranks.several


def agree(scaler: Scaler, pending: Pending) -> None:
    """Combine the findings of all ranks, unless that was done already."""
    if not pending.agreed:
        scaler._foresee(None)  # a rank without a loss joins where others look at it
        scale = scaler._placed("step")
        scaler._ranks.agree(pending, scale, scaler._iteration)


def agree_on_norm(
    scaler: Scaler, scale: Scale, pending: Pending, order: float, doing: str
) -> torch.Tensor | None:
    """Combine the findings of all ranks; return their norm, None without gradients."""
    scaler._foresee(None)
    return scaler._ranks.agree_on_norm(
        pending,
        scale,
        scaler._iteration,
        order=order,
        doing=doing,
        model=scaler._names.model,
    )


def recheck(scaler: Scaler, pending: Pending) -> None:
    """Check gradients again to which a loss that was not scaled may have added.

    Not with several ranks, which have agreed on what they found.
    """
    freshness = pending.freshness
    if freshness is None or not freshness.may_be_outdated() or scaler._ranks.several:
        return
    for device, flag in pending.flags.items():
        now = inspect(gather(pending.optimizer), torch.ones_like(flag))
        pending.flags[device] = torch.maximum(flag, now.found)


# -- clip ------------------------------------------------------------------------------


@torch.no_grad()
def clip(
    scaler: Scaler,
    scale: Scale,
    pending: Pending,
    max_norm: Number,
    order: float,
    *,
    error_if_nonfinite: bool,
) -> torch.Tensor:
    """Clip by the unscaled norm; return the norm before clipping."""
    norm = measure_norm(scaler, scale, pending, order)
    if norm is None:
        return torch.zeros_like(scale.inverse)
    if error_if_nonfinite and not norm.isfinite().item():
        raise errors.nonfinite_norm(order)
    shrink = scale.shrink(norm, max_norm)
    factor = shrink if pending.factor is None else pending.factor * shrink
    pending.clipped_norm = norm * shrink
    pending.clipped_order = order
    divides = pending.stage is OptState.READY and _divides(scale, pending, factor)
    smallest = SMALLEST if divides else _SMALLEST_FLOAT
    if not scale.may_read:
        # Skip what would apply zeros, or with a negative `max_norm` reverse gradients.
        pending.fail_where(((factor < smallest) & (shrink != 0.0)).float())
    if divides:
        pending.factor = factor.clamp(min=SMALLEST)
    else:
        pending.factor = factor
        write(pending)
    if scaler._iteration.scalings > 1 and pending.freshness is not None:
        pending.freshness.expect_backward()  # the pass of one loss may come later
    return norm


def _divides(scale: Scale, pending: Pending, factor: torch.Tensor) -> bool:
    """Return whether the optimizer divides by 1 / factor, a float32, itself."""
    if not optimizers.unscales(pending.optimizer):
        return False
    return not scale.may_read or factor.item() >= SMALLEST


def measure_norm(
    scaler: Scaler, scale: Scale, pending: Pending, order: float
) -> torch.Tensor | None:
    """Return the norm of the unscaled gradients, as clipped so far.

    None if no rank has gradients.  Gradients that were not inspected yet are, and the
    factor is decided on.
    """
    if pending.stage is OptState.UNSCALED:
        doing = "largest" if order == torch.inf else "norm"
        norm = _measure_again(scaler, scale, pending, order, doing)
        if pending.norm is None:
            pending.norm = norm
            pending.order = order
        return norm
    if pending.factor is None:
        return _measure_first(scaler, scale, pending, order)
    if pending.clipped_norm is not None and pending.clipped_order == order:
        return pending.clipped_norm
    if pending.clipped_norm is None and pending.order == order:
        return pending.norm
    doing = "largest" if order == torch.inf else "norm"
    norm = _measure_again(scaler, scale, pending, order, doing)
    if norm is None or order == 0.0:  # 0: a count
        return norm
    return norm * pending.factor


def _measure_first(
    scaler: Scaler, scale: Scale, pending: Pending, order: float
) -> torch.Tensor | None:
    """Inspect the scaled gradients, and agree with the other ranks."""
    allow_fp16 = optimizers.unscales(pending.optimizer)
    gather_gradients(scaler, pending, summed=True, allow_fp16=allow_fp16)
    inspect_gradients(scaler, scale, pending, order=order)
    norm = agree_on_norm(scaler, scale, pending, order, "clip")
    if norm is None:
        return None
    pending.order = order
    pending.norm = norm if order == 0.0 else norm * scale.inverse  # 0: a count
    pending.factor = scale.inverse
    for hook in scaler._hooks.norm_measured:
        hook(pending)
    return pending.norm if pending.clipped_norm is None else pending.clipped_norm


def _measure_again(
    scaler: Scaler, scale: Scale, pending: Pending, order: float, doing: str
) -> torch.Tensor | None:
    """Return the norm of `.grad` as it is, of gradients that were inspected before."""
    pending.gathered = gather(pending.optimizer, summed=True)
    pending.survey = inspect(
        pending.gathered,
        torch.ones_like(scale.inverse),
        order=order,
        may_read=scale.may_read,
    )
    if order > 0.0:
        pending.skip_where(pending.survey.found)  # a norm that float32 cannot hold
    return agree_on_norm(scaler, scale, pending, order, doing)


def write(pending: Pending) -> None:
    """Multiply the gradients by the factor that was decided on: unscale and clip."""
    if pending.factor is not None:
        with torch.no_grad():
            multiply_(gather(pending.optimizer), pending.factor)
    pending.factor = None
    pending.stage = OptState.UNSCALED
    pending.note_first()


# -- unscale ---------------------------------------------------------------------------


def unscale(scaler: Scaler, scale: Scale, pending: Pending) -> None:
    """Divide the gradients by the scale: by the factor, if there is one already."""
    if pending.factor is not None:
        write(pending)
        return
    found = torch.zeros_like(scale.inverse)
    optimizer = pending.optimizer
    pending.flags = scaler._unscale_grads_(optimizer, scale.inverse, found, False)
    pending.agreed = False
    pending.stage = OptState.UNSCALED
    pending.note_first()
    if pending.gathered is not None and pending.gathered.sharded:
        agree(scaler, pending)  # the flags of parts are read, as with torch's scaler
    if pending.freshness is None:  # another class has gathered them
        pending.freshness = Freshness(optimizer, gather(optimizer))
    if scaler._iteration.scalings > 1:
        pending.freshness.expect_backward()  # the pass of one loss may come later
    _keep_norms_of_overflow(scaler, scale, pending)


def _keep_norms_of_overflow(scaler: Scaler, scale: Scale, pending: Pending) -> None:
    """Note which gradients overflowed: the user may edit `.grad` from now on."""
    flags = [backend.known(flag) for flag in pending.flags.values()]
    if any(flags) and not scaler._ranks.several:
        with torch.no_grad():
            pending.gathered = gather(pending.optimizer)
            one = torch.ones_like(scale.inverse)
            pending.survey = inspect(pending.gathered, one, order=2.0)
            pending.norm = pending.survey.norm


# -- take ------------------------------------------------------------------------------


def take(
    scaler: Scaler,
    scale: Scale,
    pending: Pending,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Apply the step if all gradients are finite, else skip it; return its result."""
    optimizer = pending.optimizer
    if optimizers.takes_scaler(optimizer):
        result = optimizers.pass_scaler(scaler, pending, args, kwargs)
    elif optimizers.takes_scaling(optimizer):
        if pending.stage is OptState.READY:
            if not optimizers.unscales(optimizer):
                scaler.unscale_(optimizer)
            elif pending.factor is None and pending.survey is None:
                scaler._check_inf_per_device(optimizer)
        agree(scaler, pending)
        result = optimizers.hand_over(
            pending,
            pending.flag(scale.device),
            scaler._get_scale_async(),
            args,
            kwargs,
            ask_first=scaler._options.managed,
        )
    else:
        if pending.stage is OptState.READY:
            scaler.unscale_(optimizer)
        agree(scaler, pending)
        if not pending.flags:
            raise refuse_without_gradients(scaler, scale, pending)
        result = scaler._maybe_opt_step(optimizer, pending, *args, **kwargs)
    conclude(scaler, scale, pending)
    return result


def refuse_without_gradients(
    scaler: Scaler, scale: Scale, pending: Pending
) -> Exception:
    """Log a step that cannot be taken; return the error that names the cause."""
    stage = pending.stage
    pending.applied = False
    conclude(scaler, scale, pending, verdict=Verdict.NO_GRADS)
    pending.stage = stage
    pending.outcome = None
    return errors.no_gradients(scaler._why_no_gradients(pending.optimizer))


def conclude(
    scaler: Scaler,
    scale: Scale,
    pending: Pending,
    verdict: Verdict | None = None,
) -> None:
    """Log the outcome of a step, and call the hooks."""
    pending.stage = OptState.STEPPED
    pending.freshness = None
    found = pending.flag(scale.device)
    if pending.applied is None and found is not None:
        number = backend.known(found)
        pending.applied = None if number is None else not number
    losses = scaler._iteration.losses
    pending.outcome = scaler._log.add(
        pending, found, scale.note(), losses, verdict, step=scale.turn
    )
    if pending.applied is False:
        for hook in scaler._hooks.skipped:
            hook(pending)
    for hook in scaler._hooks.stepped:
        hook(pending)
