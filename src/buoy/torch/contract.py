"""The methods of `torch.amp.GradScaler`, public and private, implemented by Buoy.

Arguments and results are those of torch, for libraries that call or override these
methods.  Torch's five numbers are attributes of `Scale`, and properties here.
"""

from collections import defaultdict
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler as TorchGradScaler
from torch.amp.grad_scaler import OptState

from buoy._backends import torch as backend
from buoy._backends.torch.gradients import check_and_multiply_, gather
from buoy._backends.torch.losses import map_nested
from buoy._backends.torch.names import Names
from buoy._core.verdicts import Verdict
from buoy._core.warn import warn
from buoy.torch import checkpoint, errors, optimizers
from buoy.torch.distributed import Agreement
from buoy.torch.hooks import Hooks, compiled, feature, is_foreign
from buoy.torch.iteration import Freshness, Iteration, Work, combined, evidence_of
from buoy.torch.options import Options, check_factor, check_new_scale
from buoy.torch.outcome import LastStep
from buoy.torch.scale import Now, Scale
from buoy.torch.step_log import Ended, StepLog
from buoy.torch.survey import Surveyor

__all__ = ["TorchContract", "TorchGradScaler"]


def _view(name: str) -> Any:
    """Make a property, under torch's name, for an attribute of `Scale`."""
    return property(
        lambda self: getattr(self._loss_scale, name),
        lambda self, value: setattr(self._loss_scale, name, value),
    )


class TorchContract(TorchGradScaler):
    """The interface of `torch.amp.GradScaler`, with Buoy's implementation."""

    _options: Options
    _loss_scale: Scale  # the scale, and the policy that changes it
    _names: Names
    _agreement: Agreement  # the ranks that share one scale
    _iteration: Iteration
    _surveyor: Surveyor
    _log: StepLog
    _hooks: Hooks
    _per_optimizer_states: dict[int, Work]  # type: ignore[assignment]

    _scale = _view("tensor")
    _growth_tracker = _view("tracker")
    _growth_factor = _view("growth_factor")
    _backoff_factor = _view("backoff_factor")
    _growth_interval = _view("growth_interval")

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss, or every tensor of an iterable, by the scale."""
        if not self._enabled:
            return outputs
        if not isinstance(outputs, torch.Tensor):
            return map_nested(self.scale, outputs)
        if torch.compiler.is_dynamo_compiling():
            return compiled().scale(self, outputs)
        self._note_loss(outputs)
        own: Any = self._loss_scale
        scale = own.tensor if own.runner is None else own.now().tensor
        if scale.device != outputs.device:
            scale = scale.to(device=outputs.device, non_blocking=True)
        scaled = outputs * scale
        for hook in self._hooks.loss_scaled:
            hook(outputs, scaled)
        return scaled

    def _note_loss(self, loss: torch.Tensor) -> None:
        """Keep a loss, and show the first one of an iteration to the policy."""
        scale, iteration = self._loss_scale, self._iteration
        if iteration.deferred:
            self._flush()
        iteration.scalings, iteration.assumed = iteration.scalings + 1, False
        iteration.scaled = True
        if scale.tensor is None:
            self._lazy_init_scale_growth_tracker(loss.device)
        for work in self._per_optimizer_states.values():
            if work.freshness is not None:
                work.freshness.expect_backward()
        if loss.dtype is torch.float16:
            scale.fp16_loss = True
        noted = backend.value_or_copy(loss) if loss.numel() == 1 else None
        if iteration.loss_check is not None:
            iteration.loss_check.add(loss, noted)
        if noted is not None:
            iteration.losses.append(noted)
            if scale.wants and iteration.scalings == 1:  # then it must not change
                self._surveyor.foresee(loss)

    def _check_scale_growth_tracker(
        self, funcname: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scale = self._loss_scale
        if scale.tensor is None and self._agreement.active:
            # A pipeline stage or a rank without a loss needs only the scale.
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
            self._iteration.assumed = True
        if scale.tensor is None:
            raise errors.before_scale(funcname)
        if scale.tracker is None:
            raise errors.before_scale(funcname, "_growth_tracker")
        return scale.tensor, scale.tracker

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        if self._loss_scale.tracker is not None:
            raise AssertionError("_growth_tracker initialized before _scale")
        self._surveyor.introduce()
        self._loss_scale.place(dev, self._init_scale, self._init_growth_tracker)
        backend.self_test(torch.device(dev))

    def get_scale(self) -> float:
        """Return the scale; 1.0 if the scaler is disabled."""
        self._flush()
        return super().get_scale()

    def _flush(self) -> None:
        """Carry out a deferred update."""
        if self._iteration.deferred:
            self._end_iteration()

    def _get_growth_tracker(self) -> int:
        if self._enabled and (count := self._loss_scale.clean_steps) is not None:
            return count
        return super()._get_growth_tracker()

    def set_growth_factor(self, new_factor: float) -> None:
        """Set what the scale is multiplied by after `growth_interval` finite steps."""
        self._configure("growth_factor", new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set what the scale is multiplied by after an overflow."""
        self._configure("backoff_factor", new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Set after how many finite steps in a row the scale grows."""
        self._configure("growth_interval", new_interval)

    def _configure(self, name: str, value: Any) -> None:
        if self._enabled:
            self._flush()
            check_factor(name, value)
            self._loss_scale.configure(name, value)

    def _work(self, optimizer: Any, method: str) -> Work:
        """Return an optimizer's work; raise if `method` may not be called on it now.

        Every path to an update calls this: are these the gradients that were inspected?
        """
        if self._loss_scale.tensor is None:
            self._check_scale_growth_tracker(method)
        if self._iteration.compiled_looks:
            raise compiled().clipped_only()
        work = self._per_optimizer_states[id(optimizer)]
        work.optimizer = optimizer
        if work["stage"] is OptState.STEPPED and self._iteration.deferred:
            self._flush()
            return self._work(optimizer, method)
        work.check(method, self._per_optimizer_states.values())
        return work

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide this optimizer's gradients by the scale, once, and check them."""
        if not self._enabled:
            return
        if self._options.managed and feature("managed").is_unscaled(self, optimizer):
            return
        work = self._work(optimizer, "unscale_")
        if work["stage"] is OptState.UNSCALED:
            raise errors.unscale_twice()
        self._unscale(work, self._loss_scale.now())
        self._surveyor.note_unscaled(work)
        work.freshness = work.freshness or Freshness(optimizer, gather(optimizer))
        if self._iteration.scalings > 1:  # the backward pass of one may come later
            work.freshness.expect_backward()

    def _unscale(self, work: Work, now: Now, *, in_step: bool = False) -> None:
        """Apply the pending multiplier, or check and unscale in one pass."""
        if in_step and is_foreign(self.unscale_):  # a subclass unscales in its own way
            self.unscale_(work.optimizer)
            return
        if work.multiplier is not None:
            self._surveyor.write(work)
            return
        found = torch.zeros_like(now.inverse)
        flags = self._unscale_grads_(work.optimizer, now.inverse, found, False)
        self._surveyor.agree(work, flags)
        work["stage"] = OptState.UNSCALED

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """Check and multiply the gradients; return a flag per device."""
        work = self._per_optimizer_states.get(id(optimizer)) or Work()
        work.optimizer, scale = optimizer, self._loss_scale
        with torch.no_grad():
            gathered = self._surveyor.gather(work, allow_fp16=allow_fp16)
            measures = (
                scale.measures or self._hooks.looked or self._surveyor.zeros_due()
            )
            if measures and scale.tensor is not None:
                self._surveyor.inspect(work, inv_scale.reshape(()), None)
            safe = scale.is_safe(inv_scale)
            return check_and_multiply_(gathered, inv_scale, found_inf, safe=safe)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        work = self._per_optimizer_states[id(optimizer)]
        work.optimizer = optimizer
        if is_foreign(self._unscale_grads_):  # a subclass checks in its own way
            one, zero = torch.ones_like(scale), torch.zeros_like(scale)
            flags = self._unscale_grads_(optimizer, one, zero, True)
        else:
            flags = self._surveyor.check(work)
        self._surveyor.agree(work, flags)
        return self._found_inf_per_device(optimizer)

    def _found_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        self._surveyor.settle(self._per_optimizer_states[id(optimizer)])
        return super()._found_inf_per_device(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale the gradients if needed, and step if all of them are finite.

        A closure returns the loss, or scales it and calls `backward` itself; each
        evaluation is checked and unscaled (docs/guides/closures.md).
        """
        if (args or kwargs) and feature("closures").given(args, kwargs):
            return feature("closures").step(self, optimizer, args, kwargs)
        if not self._enabled:
            result = optimizer.step(*args, **kwargs)
            self._log.add_unscaled(optimizer)
            return result
        if torch.compiler.is_dynamo_compiling():
            return compiled().step(self, optimizer)
        work = self._work(optimizer, "step")
        now = self._loss_scale.now()
        for hook in self._hooks.before_step:
            hook(work)
        if not self._iteration.scalings:
            self._refuse_stale()
        if optimizers.takes_scaling(optimizer):
            result = self._step_with_found_inf(work, now, args, kwargs)
        else:
            if work["stage"] is OptState.READY:
                self._unscale(work, now, in_step=True)
            self._surveyor.settle(work)
            if not work["found_inf_per_device"]:
                raise self._no_gradients(work)
            result = self._maybe_opt_step(optimizer, work, *args, **kwargs)
        self._conclude_step(work, now)
        return result

    def _refuse_stale(self) -> None:
        """Raise for gradients of an earlier scale, if no loss was scaled elsewhere."""
        elsewhere = self._agreement.active or self._iteration.compiled_losses
        if self._iteration.scaled and not elsewhere:
            raise errors.scaled_before_update()

    def _maybe_opt_step(
        self,
        optimizer: torch.optim.Optimizer,
        optimizer_state: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Step or skip an optimizer that does not take `found_inf`."""
        work: Any = optimizer_state
        home: Any = self._loss_scale.tensor
        found = work.found = combined(work["found_inf_per_device"], home.device)
        if found is None:
            return None
        if self._options.sync == "never":
            with self._surveyor.fp16.stepping(optimizer):
                return optimizers.step_or_restore(optimizer, found, args, kwargs)
        work.finite = optimizers.read_finite(work, found)
        return optimizer.step(*args, **kwargs) if work.finite else None

    def _step_with_found_inf(
        self, work: Work, now: Now, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Step an optimizer that takes `grad_scale` and `found_inf`."""
        optimizer, survey = work.optimizer, self._surveyor
        if optimizers.takes_scaler(optimizer):
            warn(errors.PASSES_ITSELF, FutureWarning)
            work.handed = work["stage"] is not OptState.UNSCALED
            return optimizer.step(*args, **kwargs, grad_scaler=self)
        whom, sure = optimizers.recipients(optimizer)
        if work["stage"] is OptState.READY:
            if not sure:
                self._unscale(work, now, in_step=True)
            elif work.multiplier is None and work.survey is None:
                self._check_inf_per_device(optimizer)
        survey.settle(work)
        scale: Any = self._get_scale_async()
        found = work.found = combined(work["found_inf_per_device"], scale.device)
        given, ask = (scale, found, args, kwargs), self._options.managed
        return optimizers.step_with_found_inf(work, whom, *given, ask=ask)

    def _no_gradients(self, work: Work) -> Exception:
        """Log a step that cannot be taken; return the error that names the cause."""
        stage = work["stage"]
        self._conclude_step(work, self._loss_scale.now()).judged(Verdict.NO_GRADS)
        work["stage"], work.outcome = stage, None
        hints: Any = self._hooks.by_key["hints"]
        return errors.no_gradients(hints.why_no_gradients(work.optimizer))

    def _conclude_step(self, work: Work, now: Now) -> LastStep:
        """Log the outcome of a step and call the hooks."""
        work["stage"], work.freshness = OptState.STEPPED, None
        found = work.found
        if found is None:
            found = combined(work["found_inf_per_device"], now.device)
        outcome = self._log.add(work, found, now.copy, self._iteration.losses)
        if work.finite is False:
            for hook in self._hooks.skipped:
                hook(work)
        for hook in self._hooks.stepped:
            hook(work)
        return outcome

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Update the scale; call it once per iteration, after all steps."""
        if not self._enabled:
            self._log.norms.clear()
            self._log.open_gates(None)
            return
        if torch.compiler.is_dynamo_compiling():
            compiled().update(self)
            return
        if self._options.managed:
            if new_scale is None:
                feature("managed").defer(self)
                return
            self._flush()
        self._end_iteration(new_scale)

    def _end_iteration(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Update the scale, and those of all scale groups."""
        for hook in self._hooks.before_update:
            hook()
        groups: Any = self._hooks.by_key.get("groups")
        if groups is not None:
            groups.update(self, new_scale)
        else:
            self._update(new_scale)

    def _update(self, new_scale: Any = None, *, idle: bool = False) -> None:
        """Update this scale only; `idle`: also if no optimizer has findings."""
        scale, iteration = self._loss_scale, self._iteration
        if scale.tensor is None:
            self._check_scale_growth_tracker("update")
        works = list(self._per_optimizer_states.values())
        now, evidence = scale.now(), None
        if new_scale is None:
            evidence = evidence_of(works, now.device)
            if evidence is None and not idle:
                raise errors.nothing_recorded()
        else:
            check_new_scale(new_scale, self._device, scale)
            scale.set(new_scale)
        try:
            both, turn = (now.copy, scale.move(evidence, now).copy), scale.turn - 1
            ended = Ended(works, evidence, iteration, turn, both, now.device)
            self._log.end(ended, self._hooks)
        finally:
            iteration.scalings, iteration.deferred = 0, False
            iteration.forget_losses()
            self._per_optimizer_states = defaultdict(Work)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's five entries, plus `buoy` if a policy or feature has state."""
        if not self._enabled:
            return {}
        state = super().state_dict()  # first: it carries out a deferred update
        return {**state, **checkpoint.own_state(self._loss_scale, self._hooks)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state of this class or of `torch.amp.GradScaler`."""
        if not self._enabled:
            return
        self._flush()
        state = checkpoint.checked(state_dict, self._loss_scale)
        checkpoint.load(state, self._loss_scale, self._hooks)
        self._init_scale, self._init_growth_tracker = state.scale, state.clean_steps
        # Gradients that were scaled or inspected before this are of another run.
        self._iteration.scalings, self._per_optimizer_states = 0, defaultdict(Work)
        self._iteration.forget_losses()
