"""Steps with a closure: LBFGS, SAM and other optimizers that evaluate the model.

Each evaluation is scaled, checked and unscaled separately, so that the optimizer sees
the same gradients as in FP32.  If one overflows, the step ends: weights, state and
settings are restored to those before the step, and it counts as skipped.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from buoy._backends import torch as backend
from buoy._backends.torch.gradients import parameters_of
from buoy._backends.torch.snapshot import OptimizerSnapshot
from buoy._core.errors import CallOrderError, DeviceModeError
from buoy._core.ops import single
from buoy.torch import step as torch_step
from buoy.torch.features.guard import undo_buffers
from buoy.torch.features.joint import Joint
from buoy.torch.features.spikes import Spikes
from buoy.torch.freshness import Freshness
from buoy.torch.hooks import Scaler
from buoy.torch.optimizers import read_outcome
from buoy.torch.pending import Pending, merged
from buoy.torch.scale import Measured, Plan

__all__ = ["given", "step"]

Closure = Callable[[], Any]


class _OverflowError(BaseException):  # no `except Exception` of an optimizer stops it
    """An evaluation overflowed: leave the optimizer's step."""


def given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the arguments of an optimizer's `step` contain a closure.

    Example:
        >>> given((print,), {}), given((), {"closure": None})
        (True, False)
    """
    return bool(args and callable(args[0])) or kwargs.get("closure") is not None


def step(
    scaler: Scaler,
    optimizer: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a step with a closure; apply it, or undo all of it."""
    by_name = kwargs.get("closure")
    closure = args[0] if by_name is None else by_name

    def step_with(other: Closure) -> Any:
        if by_name is None:
            return optimizer.step(other, *args[1:], **kwargs)
        return optimizer.step(*args, **{**kwargs, "closure": other})

    if not scaler.is_enabled():
        result = step_with(partial(_evaluate_unscaled, optimizer, closure))
        scaler._log.add_unscaled(optimizer)
        return result
    pending = _begin(scaler, optimizer)
    evaluation = _Evaluation(scaler, pending, closure)
    snapshot = OptimizerSnapshot(optimizer)
    result = None
    try:
        if scaler._iteration.scalings or pending.freshness is not None:
            evaluation.check()  # gradients computed before the step, as for SAM
        result = step_with(evaluation)
    except BaseException as error:
        snapshot.restore()
        if not isinstance(error, _OverflowError):
            undo_buffers(scaler, optimizer)
            raise
    if pending.applied is None:
        snapshot.restore()
        raise CallOrderError(type(optimizer).__name__ + _NOT_CALLED)
    evaluation.conclude(snapshot)
    return result if pending.applied else None


def _begin(scaler: Scaler, optimizer: Any) -> Pending:
    """Return the optimizer's gradients; raise if it cannot step now."""
    if scaler._options.sync == "never" or torch.compiler.is_dynamo_compiling():
        raise DeviceModeError(_NEEDS_HOST)
    if scaler._hooks.find(Spikes) is not None:
        raise CallOrderError(_SPIKES)
    pending = scaler._per_optimizer_states[id(optimizer)]
    pending.optimizer = optimizer
    if not isinstance(scaler._loss_scale, Plan):
        pending = scaler._pending(optimizer, "step")
        torch_step.recheck(scaler, pending)
    scaler._hooks.before_step_without(Joint, pending)  # see `conclude`
    scaler._fp16.prepare(optimizer, scaler._names)
    return pending


class _Evaluation:
    """The user's closure, with scaling around each call."""

    def __init__(self, scaler: Scaler, pending: Pending, closure: Closure) -> None:
        self.scaler = scaler
        self.pending = pending
        self.closure = closure
        self._measured: list[Measured] = []  # of each evaluation

    def __call__(self) -> Any:
        scaler = self.scaler
        pending = self.pending
        optimizer = pending.optimizer
        pending.forget()
        before = scaler._iteration.scalings
        with torch.enable_grad():
            loss, ran_backward = _observe(optimizer, self.closure)
            held = scaler._per_optimizer_states.get(id(optimizer))
            if held is not pending or pending.stage is OptState.STEPPED:
                raise CallOrderError(_UPDATES)
            if scaler._iteration.scalings > before:
                self._refuse_scaled(loss)
            elif ran_backward:
                raise CallOrderError(_NOT_SCALED)
            elif not isinstance(loss, torch.Tensor) or not loss.requires_grad:
                raise CallOrderError(f"The closure returned {loss!r:.60}{_NO_LOSS}")
            else:
                optimizer.zero_grad()
                scaler.scale(loss).backward()
        if not self.check():
            scale = scaler._placed("step")
            raise torch_step.refuse_without_gradients(scaler, scale, pending)
        return loss

    def _refuse_scaled(self, loss: Any) -> None:
        """Raise if the closure returned the scaled loss: line searches compare it."""
        losses = self.scaler._iteration.losses
        if losses and isinstance(loss, torch.Tensor) and loss.numel() == 1:
            scale = self.scaler._placed("step").tensor
            returned, bare, times = backend.read([loss, losses[-1], scale])
            if returned == single(bare * times) != bare:
                raise CallOrderError(_RETURNS_SCALED)

    def check(self) -> bool:
        """Unscale and check the gradients; end the step if they overflow.

        Returns whether there are gradients.
        """
        scaler = self.scaler
        pending = self.pending
        if pending.stage is OptState.READY:
            scaler.unscale_(pending.optimizer)
        torch_step.agree(scaler, pending)
        found = pending.flag(scaler._placed("step").device)
        if found is None:
            return False
        read_outcome(pending, found)
        self._measured.append(pending.measured)
        if not pending.applied:
            raise _OverflowError
        return True

    def conclude(self, snapshot: OptimizerSnapshot) -> None:
        """Log one step: the last evaluation, with the largest of all measurements."""
        scaler = self.scaler
        pending = self.pending
        scale = scaler._placed("step")
        if len(self._measured) > 1:
            pending.measured = merged(self._measured, scale.device)
        joint = scaler._hooks.find(Joint)
        if joint is not None:
            joint.adopt(scaler, pending, snapshot)
        torch_step.conclude(scaler, scale, pending)
        if not pending.applied:
            if pending.outcome is not None:
                pending.outcome.find_offenders()  # before `.grad` is cleared
            for param in parameters_of(pending.optimizer):
                param.grad = None  # or the next step would take them for pending ones


def _evaluate_unscaled(optimizer: Any, closure: Closure) -> Any:
    """Evaluate for a disabled scaler: call `backward` if the closure did not."""
    with torch.enable_grad():
        loss, ran_backward = _observe(optimizer, closure)
        if not ran_backward and isinstance(loss, torch.Tensor) and loss.requires_grad:
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
    return loss


def _observe(optimizer: Any, closure: Closure) -> tuple[Any, bool]:
    """Call a closure; return its loss, and whether it ran a backward pass itself."""
    watch = Freshness(optimizer, None)
    watch.expect_backward()
    loss = closure()
    return loss, watch.touched


# -- refusals --------------------------------------------------------------------------

_NEEDS_HOST = (
    "A closure works neither with `sync='never'` nor in torch.compile: an optimizer "
    "continues only if the evaluation did not overflow. Use a scaler with "
    "`sync='auto'`, outside of compiled functions."
)
_SPIKES = (
    "`spike_guard` does not work with a closure: the optimizer also evaluates points "
    "that it does not step to, and their norms say nothing about the batch. Use a "
    "scaler without `spike_guard` for this optimizer."
)
_NOT_SCALED = (
    "The closure called `backward()` on a loss that was not scaled: its gradients may "
    "have underflowed, and must not be divided by the scale. Let it only return the "
    "loss, or write `scaler.scale(loss).backward()` in it. Nothing was changed."
)
_RETURNS_SCALED = (
    "The closure returned the scaled loss, which the optimizer would compare with "
    "unscaled gradients. Return the loss itself: "
    "`scaler.scale(loss).backward(); return loss`. Nothing was changed."
)
_NO_LOSS = (
    " and did not call `backward()`, so there are no gradients. Let it return the loss "
    "as a tensor with its graph: not `loss.item()`, not detached. Nothing was changed."
)
_UPDATES = (
    "The closure called `scaler.update()` or `scaler.step()`: the scale must stay as "
    "it is until the optimizer has finished evaluating. Call `update()` once, after "
    "`scaler.step(optimizer, closure)`. Nothing was changed."
)
_NOT_CALLED = (
    " stepped without calling the closure, with gradients that were not checked; the "
    "step was undone. Compute them first: `scaler.scale(loss).backward()`, then "
    "`scaler.step(optimizer)`."
)
