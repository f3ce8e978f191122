"""Steps with a closure: LBFGS, SAM and whatever else evaluates the model itself.

Each evaluation is scaled, checked and unscaled by itself, so the optimizer sees what it
would see in FP32.  If one overflows, the step is given up where it is: weights, state
and settings go back to where it began, and it counts as skipped.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from buoy._backends import torch as backend
from buoy._core.state import Verdict
from buoy.torch import apply, words, words_beyond
from buoy.torch.gather import parameters_of
from buoy.torch.start import StartingPoint

if TYPE_CHECKING:
    from buoy.torch.scaler import GradScaler

__all__ = ["closure_of", "plain_step", "step", "wanted"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class _OverflowError(BaseException):  # no `except Exception` of an optimizer stops it
    """An evaluation overflowed: leave the optimizer's step."""


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Find a closure among what is passed on to an optimizer's step."""
    if args and callable(args[0]):
        return args[0]
    return kwargs.get("closure")


def wanted(scaler: "GradScaler", args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Say whether this is a step with a closure, which torch knows to be none."""
    if not scaler._strict:
        return closure_of(args, kwargs) is not None
    if "closure" in kwargs:
        raise words.closure()
    return False


def plain_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Step without a scaler; a closure that only returns the loss works here too."""
    closure = closure_of(args, kwargs)
    if closure is None:
        return optimizer.step(*args, **kwargs)

    @wraps(closure)
    def evaluated() -> Any:
        with torch.enable_grad(), _reached(optimizer) as reached:
            loss = closure()
        if not reached and isinstance(loss, torch.Tensor) and loss.requires_grad:
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
        return loss

    args, kwargs = _with(evaluated, args, kwargs)
    return optimizer.step(*args, **kwargs)


def step(
    scaler: "GradScaler", optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> float | None:
    """Let an optimizer evaluate; apply what it makes of it, or start over."""
    if scaler._never_sync or torch.compiler.is_compiling():
        raise words.closure_never_syncs()
    if scaler._spikes is not None:
        raise words.closure_spikes()
    if scaler._window is not None:
        raise words_beyond.window_open("step")
    record = scaler._per_optimizer_states[id(optimizer)]
    if record["stage"] is OptState.STEPPED:
        raise words.step_twice()
    scaler._refuse_alias(optimizer, record)
    scaler._guide.before_step(scaler, optimizer)
    scaler._halves.masters(optimizer, scaler._names)  # before the optimizer begins
    evaluation = _Evaluation(scaler, optimizer, closure_of(args, kwargs))
    args, kwargs = _with(evaluation, args, kwargs)
    start = StartingPoint(optimizer)
    result: float | None = None
    try:
        evaluation.look_at_pending()
        result = optimizer.step(*args, **kwargs)
        evaluation.refuse_idle()
    except _OverflowError:
        start.restore()
    except BaseException:
        start.restore()
        raise
    return result if evaluation.conclude(start) else None


class _Evaluation:
    """The user's closure, with scaling around each call."""

    def __init__(
        self, scaler: "GradScaler", optimizer: Any, closure: Callable[[], Any]
    ) -> None:
        self.scaler, self.optimizer, self.closure = scaler, optimizer, closure
        self.records: list[dict[str, Any]] = []
        self._scales_itself: bool | None = None  # learnt from the first call
        self._scale: float | torch.Tensor = 1.0

    def look_at_pending(self) -> None:
        """Unscale gradients that were computed before the step, as for SAM's first."""
        record = self.scaler._per_optimizer_states[id(self.optimizer)]
        pending = record["stage"] is OptState.UNSCALED or "multiplier" in record
        if pending or self.scaler._scalings:
            self._check(record, must=False)

    def __call__(self) -> Any:
        scaler, key = self.scaler, id(self.optimizer)
        record = scaler._per_optimizer_states[key] = _refresh_per_optimizer_state()
        with torch.enable_grad():
            loss = self._called(record)
            if not self._scales_itself:
                self._backward(loss)
        self._check(record, must=True)
        return loss

    def _called(self, record: dict[str, Any]) -> Any:
        """Call the closure; the first time, watch what it does."""
        if self._scales_itself is not None:
            return self.closure()
        before = self.scaler._scalings
        with _reached(self.optimizer) as reached:
            loss = self.closure()
        held = self.scaler._per_optimizer_states.get(id(self.optimizer))
        if held is not record or record["stage"] is OptState.STEPPED:
            raise words.closure_updates()
        self._scales_itself = self.scaler._scalings > before
        if reached and not self._scales_itself:
            raise words.closure_unscaled()
        if self._scales_itself:
            self._refuse_scaled(loss)
        return loss

    def _refuse_scaled(self, loss: Any) -> None:
        """Refuse the scaled loss as a closure's result: line searches compare it."""
        losses, scale = self.scaler._losses, self.scaler._scale
        if scale is None or not losses or not isinstance(loss, torch.Tensor):
            return
        if loss.numel() != 1:
            return
        bare = backend.number(losses[-1], loss.device)
        given, times = float(loss.detach()), float(bare * scale.to(bare.device))
        if given == times != float(bare):
            raise words.closure_returns_scaled()

    def _backward(self, loss: Any) -> None:
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            raise words.closure_without_loss(loss)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()

    def _check(self, record: dict[str, Any], *, must: bool) -> None:
        """Unscale what has not been, and leave the step if it is not finite."""
        scaler, optimizer = self.scaler, self.optimizer
        self._scale = scaler._frozen_scale()
        if record["stage"] is OptState.READY:
            scaler.unscale_(optimizer)
        scaler._settle(record)
        found = apply.combined(record["found_inf_per_device"], scaler._home())
        if found is None:
            if must:
                scaler._report(optimizer, record, self._scale).judged(Verdict.NO_GRADS)
                raise words.no_gradients(scaler._guide.why_no_gradients(optimizer))
            return
        record["finite"] = scaler._ask(record, found)
        self.records.append(record)
        if not record["finite"]:
            raise _OverflowError

    def refuse_idle(self) -> None:
        """Refuse a step that has evaluated nothing: it applied unknown gradients."""
        if not self.records:
            raise words.closure_not_called(type(self.optimizer).__name__)

    def conclude(self, start: StartingPoint) -> bool:
        """Note one step for all evaluations: the last, and the largest of all."""
        scaler = self.scaler
        record = {**self.records[-1], **apply.largest(self.records)}
        record["stage"] = OptState.STEPPED
        scaler._per_optimizer_states[id(self.optimizer)] = record
        if scaler._joint is not None:
            scaler._joint.adopt(record, start, scaler._home())
        report = scaler._report(self.optimizer, record, self._scale)
        if not record["finite"]:
            _ = report.norm  # while the gradients are there
            for param in parameters_of(self.optimizer):
                param.grad = None  # or the next step would take them for pending ones
        return bool(record["finite"])


@contextmanager
def _reached(optimizer: Any) -> Iterator[list[bool]]:
    """Notice whether a backward pass reaches any of an optimizer's parameters."""
    reached: list[bool] = []

    def notice(_: torch.Tensor) -> None:
        reached.append(True)

    handles = [
        param.register_post_accumulate_grad_hook(notice)  # type: ignore[no-untyped-call]
        for param in parameters_of(optimizer)
        if param.requires_grad
    ]
    try:
        yield reached
    finally:
        for handle in handles:
            handle.remove()


def _with(
    closure: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments:
    """Pass a closure on in the place of the one that was given."""
    if args and callable(args[0]):
        return (closure, *args[1:]), kwargs
    return args, {**kwargs, "closure": closure}
