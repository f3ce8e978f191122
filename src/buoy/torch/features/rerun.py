"""Run a batch again at a lower scale, instead of skipping it."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

from buoy._backends import torch as backend
from buoy._backends.torch.snapshot import RandomSnapshot
from buoy._core.bounds import bounds_of
from buoy._core.errors import CallOrderError, OptionError
from buoy._core.policies.loss_ahead import unwrapped
from buoy._core.policies.policy import Policy
from buoy._core.policies.static import NoScaling, Static
from buoy._core.verdicts import VERDICTS
from buoy.torch.features.groups import Groups, Member
from buoy.torch.hooks import Scaler
from buoy.torch.outcome import LastStep

__all__ = ["run"]

_R = TypeVar("_R")
_Steps = dict[LastStep, Scaler]  # and who took it


def run(
    scaler: Scaler,
    step_fn: Callable[[], _R],
    optimizers: tuple[Any, ...],
    retries: int,
) -> _R:
    """Run a step; if it overflowed, run it again at a lower scale.

    `run` clears the gradients, calls `step_fn`, steps and updates; without `optimizers`
    `step_fn` does all of that itself, as the body of a loop.  Before a re-run random
    generators (torch's on every device, Python's, NumPy's) are restored, so that
    dropout repeats.  A skip that no scale can prevent is not run again.

    The scale falls by a factor of 2, then of 4, 16, 256, ...; from there the policy
    raises it.  If no re-run succeeds, the scale is the same as after a single skip.  A
    static scale is restored in both cases.

    Example:
        >>> import torch
        >>> import buoy.torch
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> scaler = buoy.torch.GradScaler("cpu")
        >>> def step():
        ...     loss = weight.half().sum()  # its gradient fits up to 2^15
        ...     scaler.scale(loss.float()).backward()
        ...     return loss.item()
        >>> scaler.run(step, optimizer)
        2.0
        >>> scaler.last_step.applied, scaler.last_step.scale
        (True, 32768.0)
    """
    if not scaler._enabled:
        return _attempt(scaler, step_fn, optimizers)
    _check(scaler, optimizers, retries)
    generators = RandomSnapshot()
    after_one_skip: dict[Scaler, float] = {}  # the scales of those that overflowed
    taken: _Steps = {}
    tries = 0
    try:
        while True:
            before = _last_steps(scaler)
            taken = {}
            result = _attempt(scaler, step_fn, optimizers)
            now = _last_steps(scaler)
            taken = {step: one for step, one in now.items() if step not in before}
            if not taken:
                raise CallOrderError(_NO_STEP)
            if tries == retries or not _may_run_again(scaler, taken):
                return result
            for step, one in taken.items():
                if step.optimizer is not None:
                    step.optimizer.zero_grad(set_to_none=True)
                if not step.partner:
                    after_one_skip.setdefault(one, one.get_scale())
                    lower = math.ldexp(step.scale, -(2**tries))
                    _override(one, min(one.get_scale(), lower))
            generators.restore()
            tries += 1
    finally:
        applied = {one for step, one in taken.items() if step.applied}
        for one, scale in after_one_skip.items():
            if one not in applied or _stays(one.policy):
                _override(one, scale)


def _check(scaler: Scaler, optimizers: tuple[Any, ...], retries: int) -> None:
    """Raise for a call that a re-run could not repeat."""
    if type(retries) is not int or retries < 0:
        raise OptionError(
            f"`retries` must be a whole number, 0 or more; got {retries!r}."
        )
    if (group := scaler._hooks.find(Member)) is not None:
        raise OptionError(
            f"`run` was called on scale group {group.name!r}, but a step belongs to "
            "all of them: call `scaler.run(...)` and use the scale groups inside."
        )
    if optimizers and scaler._hooks.find(Groups) is not None:
        raise OptionError(
            "`run` was given optimizers, but this scaler has scale groups: which of "
            "them steps an optimizer is known to your code only. Let the function "
            "clear the gradients, step with the groups and call `scaler.update()`, and "
            "write `scaler.run(step_fn)`."
        )
    scaler._flush()
    if _mid_iteration(scaler):
        raise CallOrderError(
            "`run` was called in the middle of an iteration: a re-run could not undo "
            "what was unscaled or stepped before it. Pass a function that does the "
            "whole step."
        )


def _attempt(
    scaler: Scaler, step_fn: Callable[[], _R], optimizers: tuple[Any, ...]
) -> _R:
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    result = step_fn()
    for optimizer in optimizers:
        scaler.step(optimizer)
    if optimizers or _mid_iteration(scaler):
        scaler.update()
        scaler._flush()
    return result


def _override(scaler: Scaler, scale: float) -> None:
    """Set the scale within an iteration; keep the rest of the policy's state."""
    scaler._placed("run").override(scale)


def _mid_iteration(scaler: Scaler) -> bool:
    return any(one._enabled and one._per_optimizer_states for one in scaler._family)


def _last_steps(scaler: Scaler) -> _Steps:
    """Map each optimizer's last step to the scaler, or scale group, that took it."""
    return {
        step: one for one in scaler._family for step in one._log.by_optimizer.values()
    }


def _may_run_again(scaler: Scaler, taken: _Steps) -> bool:
    """Return whether all steps were skipped, and may succeed at a lower scale."""
    missed = {step: one for step, one in taken.items() if not step.applied}
    if not missed:
        return False
    curable = all(
        VERDICTS[step.verdict].curable
        and (step.partner or step.scale > _lowest(one.policy))
        for step, one in missed.items()
    )
    one = next(iter(missed.values()))
    objects = backend.scalar(float(not curable), one._placed("run").device)
    if backend.read_one(one._ranks.largest(objects, "again")):
        return False  # all ranks run again, or none
    if len(missed) < len(taken):
        scaler._warn_once("half a step", _HALF_A_STEP)
        return False
    return True


def _stays(policy: Policy) -> bool:
    """Return whether the policy would keep the scale of the last attempt for good."""
    return isinstance(unwrapped(policy), Static)


def _lowest(policy: Policy) -> float:
    """Return the lowest scale that may be tried."""
    if isinstance(unwrapped(policy), NoScaling):
        return math.inf
    return bounds_of(policy).low


_NO_STEP = (
    "`run` has nothing to step: no optimizer was passed and the function did not call "
    "`scaler.step`. Write `scaler.run(step_fn, optimizer)`."
)
_HALF_A_STEP = (
    "`run` did not run this batch again: one optimizer has stepped, another has not. "
    "Pass `skip='joint'` to GradScaler, so that all of them step or none."
)
