"""Run a batch again at a lower scale, instead of skipping it."""

import math
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

import torch

from buoy._backends import torch as backend
from buoy._backends.torch.gradients import parameters_of, take_survey
from buoy._backends.torch.snapshot import BufferSnapshot, RandomSnapshot
from buoy._core.errors import CallOrderError, OptionError
from buoy._core.policies.static import NoScaling, Static
from buoy._core.verdicts import VERDICTS, Verdict
from buoy.torch.features.groups import family
from buoy.torch.features.guard import guarded
from buoy.torch.hooks import Extension
from buoy.torch.iteration import Work
from buoy.torch.outcome import LastStep

__all__ = ["run"]

_CURABLE = frozenset(name for name, meaning in VERDICTS.items() if meaning.curable)
_R = TypeVar("_R")


def run(
    scaler: Any,
    step_fn: Callable[[], _R],
    optimizers: tuple[Any, ...],
    options: dict[str, Any],
) -> _R:
    """Run a step; if its scale was too high, run it again at a lower scale.

    `run` clears the gradients, calls `step_fn`, steps and updates; without `optimizers`
    `step_fn` does all of that itself, as the body of a loop.  Before a re-run random
    generators (torch's on every device, Python's, NumPy's) and the buffers of the
    modules are restored, so that dropout and statistics repeat.  A skip that no scale
    can prevent is not run again; see `last_step`.

    After a batch that succeeded, its gradients fit at the scale.  After one that did
    not, the scale is the same as after a single skip.  A static scale is restored in
    both cases.

    Args:
        scaler: the scaler.
        step_fn: computes the loss, scales it and calls `backward()`, and may clip;
            its result is returned.
        optimizers: the optimizers to step after it.
        options: `modules`, whose buffers are restored (by default the scaler's `model`
            and guarded models; `()` for none); `retries`, by default 6; `retry_on`,
            the verdicts to run again for; `generators`, further ones to restore.

    Example:
        >>> import buoy.torch
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> scaler = buoy.torch.GradScaler("cpu")
        >>> def step():
        ...     loss = weight.half().sum()  # its gradient fits up to 2^15
        ...     scaler.scale(loss.float()).backward()
        ...     return loss.item()
        >>> scaler.run(step, optimizer, modules=())
        2.0
        >>> scaler.last_step.applied, scaler.last_step.scale
        (True, 32768.0)
    """
    if not scaler._enabled:
        return _attempt(scaler, step_fn, optimizers)
    if (group := scaler._hooks.find("group")) is not None:
        raise OptionError(
            f"`run` was called on scale group {group.name!r}, but a step belongs to "
            "all of them: call `scaler.run(...)` and use the scale groups inside."
        )
    if optimizers and scaler._hooks.find("groups") is not None:
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
    for one in family(scaler):
        if one._hooks.find("run") is None:
            one._hooks.add(_History(one._log.history))
    batch = _Batch(scaler, **options)
    try:
        while True:
            before = _last_steps(scaler)
            batch.steps = {}
            result = _attempt(scaler, step_fn, optimizers)
            now = _last_steps(scaler)
            batch.steps = {step: one for step, one in now.items() if step not in before}
            if not batch.prepare_again():
                return result
    finally:
        batch.end()


def _attempt(scaler: Any, step_fn: Callable[[], _R], optimizers: tuple[Any, ...]) -> _R:
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    result = step_fn()
    for optimizer in optimizers:
        scaler.step(optimizer)
    if optimizers or _mid_iteration(scaler):
        scaler.update()
        scaler._flush()
    return result


def _mid_iteration(scaler: Any) -> bool:
    return any(s._enabled and s._per_optimizer_states for s in family(scaler))


def _last_steps(scaler: Any) -> dict[LastStep, Any]:
    """Map each optimizer's last step to the scaler, or scale group, that took it."""
    return {
        step: one for one in family(scaler) for step in one._log.by_optimizer.values()
    }


class _History(Extension):
    """Saves the losses of earlier steps, which decide whether a batch is run again."""

    key = "run"

    def __init__(self, losses: Any) -> None:
        self._losses = losses  # the deque of the scaler's log

    def state_dict(self) -> list[float]:
        """Return the losses.  Reads on the host."""
        return backend.read(list(self._losses))

    def load_state_dict(self, state: list[float]) -> None:
        """Restore them."""
        self._losses.clear()
        self._losses.extend(state)


class _Batch(Extension):
    """One batch: the state to restore before a re-run, and the scales to try.

    From the second re-run on it is attached, to measure the largest gradients.
    """

    def __init__(
        self,
        scaler: Any,
        *,
        modules: torch.nn.Module | Iterable[torch.nn.Module] | None = None,
        retries: int = 6,  # the scale falls by 1, 2, 4, ... factors of two: 63 in all
        retry_on: Collection[Verdict | str] = (Verdict.SCALE_TOO_HIGH,),
        generators: Iterable[torch.Generator] = (),
    ) -> None:
        if type(retries) is not int or retries < 0:
            raise OptionError(
                f"`retries` must be a whole number, 0 or more; got {retries!r}."
            )
        causes = {retry_on} if isinstance(retry_on, str) else set(retry_on)
        if not causes <= _CURABLE:
            raise OptionError(
                f"`retry_on` must be among {sorted(map(str, _CURABLE))}, got "
                f"{retry_on!r}: a lower scale does not change the other verdicts."
            )
        self.steps: dict[LastStep, Any] = {}  # of one attempt, with their scalers
        self._scaler, self._retries, self._causes = scaler, retries, causes
        self._tries = 0
        self._skipped: dict[Any, float] = {}  # each scale after the first skip
        self._failed: dict[Any, float] = {}  # the lowest scale that overflowed
        self._sizes: dict[Any, torch.Tensor] = {}  # the largest unscaled gradients
        self._buffers, found = BufferSnapshot(), _modules(scaler, modules)
        for module in found:
            self._buffers.copy(*module.modules())
        params: list[torch.Tensor] = [p for one in found for p in one.parameters()]
        for optimizer in scaler._hooks.find("hints").optimizers():
            params += parameters_of(optimizer)
        self._before = {param: _mark(param) for param in params}
        self._random = RandomSnapshot(generators)

    def prepare_again(self) -> bool:
        """Return whether to run again; if so, restore state and lower the scales."""
        if not self.steps:
            raise CallOrderError(_NO_STEP)
        missed = {step: one for step, one in self.steps.items() if not step.applied}
        if not missed:
            return False
        guilty = {one: step.scale for step, one in missed.items() if not step.partner}
        curable = (
            self._tries < self._retries
            and all(scale > _lowest(one._loss_scale) for one, scale in guilty.items())
            and all(step.verdict in self._causes for step in missed)
            and not self._adds_to_others()
        )
        one = next(iter(missed.values()))
        objects = backend.scalar(float(not curable), one._loss_scale.now().device)
        if any(backend.read([one._agreement.largest(objects, "again")])):
            return False  # all ranks run again, or none
        if len(missed) < len(self.steps):
            self._scaler._hooks.find("hints").warn("half a step", _HALF_A_STEP)
            return False
        for optimizer in {step.optimizer for step in missed} - {None}:
            optimizer.zero_grad(set_to_none=True)
        for one, scale in guilty.items():
            now = one.get_scale()
            self._skipped.setdefault(one, now)
            self._failed[one] = scale
            one._loss_scale.override(min(now, math.ldexp(scale, -(2**self._tries))))
        self._buffers.restore()
        self._random.restore()
        self._tries += 1
        self._sizes.clear()
        if self._tries == 2:
            for one in family(self._scaler):
                one._hooks.add(self)
        return True

    def _adds_to_others(self) -> bool:
        """Warn if the batch changed gradients of parameters that it does not step."""
        steps = [step.optimizer for step in self.steps]
        stepped = {p for one in steps if one is not None for p in parameters_of(one)}
        for param, before in self._before.items():
            if param not in stepped and _mark(param) not in (before, None):
                self._scaler._hooks.find("hints").warn("others", _OTHERS)
                return True
        return False

    def looked(self, scaler: Any, work: Work) -> None:
        """Measure the largest gradient of this attempt."""
        inverse, size = scaler._loss_scale.now().inverse, work.amax
        if size is None and work.gathered is not None:
            size = take_survey(work.gathered, inverse, amax=True).amax
        if size is not None:
            size = size * inverse
            self._sizes[scaler] = torch.maximum(size, self._sizes.get(scaler, size))

    def end(self) -> None:
        """Set the scales that were lowered to those for the next step."""
        missed = {one for step, one in self.steps.items() if not step.applied}
        applied = set(self.steps.values()) - missed
        for one, scale in self._skipped.items():
            if one not in applied or isinstance(one._loss_scale.policy, Static):
                one._loss_scale.override(scale)
            elif self._tries > 1:
                self._raise_to_fit(one)
        if self._tries > 1:
            for one in family(self._scaler):
                one._hooks.remove(self)

    def _raise_to_fit(self, one: Any) -> None:
        """Raise a scale that fell far, to a factor of two below FP16's overflow."""
        size = self._sizes.get(one, torch.zeros_like(one._loss_scale.now().inverse))
        (amax,) = backend.read([one._agreement.largest(size, "fit")])
        if 0.0 < amax < math.inf:
            fits = math.ldexp(1.0, 15 - math.frexp(amax)[1])  # FP16 ends below 2^16
            best = min(fits, self._failed[one] / 2.0)
            one._loss_scale.override(max(best, one.get_scale()))


def _lowest(scale: Any) -> float:
    """Return the lowest scale that may be tried."""
    if isinstance(scale.policy, NoScaling):
        return math.inf
    return float(scale.low if scale.runner is None else scale.runner.limits()[0])


def _mark(param: torch.Tensor) -> tuple[int, int] | None:
    """Return a value that changes if a backward pass adds to a gradient; None: none."""
    return None if param.grad is None else (id(param.grad), param.grad._version)


def _modules(scaler: Any, given: Any) -> list[torch.nn.Module]:
    """Return the modules whose buffers a batch may change."""
    if given is not None:
        return [given] if isinstance(given, torch.nn.Module) else list(given)
    known = [one.model for one in guarded(scaler)]
    if scaler._names.model is not None:
        known.append(scaler._names.model)
    if not known:
        raise CallOrderError(_NO_MODEL)
    return known


_NO_STEP = (
    "`run` has nothing to step: no optimizer was passed and the function did not call "
    "`scaler.step`. Write `scaler.run(step_fn, optimizer)`."
)
_NO_MODEL = (
    "`run` needs the modules whose buffers a re-run must restore: batch statistics "
    "would count the batch twice. Build the scaler with `model=...`, or pass "
    "`modules=[...]`; if no module has buffers, pass `modules=()`."
)
_OTHERS = (
    "`run` did not run this batch again: it added to gradients of parameters that it "
    "does not step, and a re-run would add to them again. Step all optimizers "
    "whose gradients the function computes, or run the others' backward pass outside."
)
_HALF_A_STEP = (
    "`run` did not run this batch again: one optimizer has stepped, another has not. "
    "Pass `skip='joint'` to GradScaler, so that all of them step or none."
)
