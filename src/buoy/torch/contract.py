"""The methods of `torch.amp.GradScaler`, public and private, implemented by Buoy.

Arguments and results are those of torch, for libraries that call or override these
methods.  `buoy.torch.step` tells what happens to the gradients.
"""

import inspect
from collections import defaultdict
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import GradScaler as TorchGradScaler
from torch.amp.grad_scaler import OptState

from buoy._backends import torch as backend
from buoy._backends.torch.gradients import Flags, unscale_
from buoy._backends.torch.losses import map_nested
from buoy._backends.torch.names import Names
from buoy._core.errors import OptionError
from buoy._core.policies.policy import Policy
from buoy._core.policies.static import NoScaling
from buoy._core.policies.torch_rule import TorchRule
from buoy.torch import checkpoint, errors, optimizers, step
from buoy.torch.distributed import Sharing
from buoy.torch.hooks import Extension, Fp16, Hooks, Scaler
from buoy.torch.iteration import Iteration
from buoy.torch.options import Options, TorchNumbers, check_factor, check_new_scale
from buoy.torch.pending import Pending, evidence_of
from buoy.torch.ranks import Ranks
from buoy.torch.scale import Plan, Scale
from buoy.torch.step_log import Ended, StepLog

if TYPE_CHECKING:
    from buoy.trace import Recorder

__all__ = ["TorchContract", "TorchGradScaler"]


def _number(name: str) -> Any:
    """Make a property for one of the three numbers of torch's rule."""

    def get(self: "TorchContract") -> Any:
        return getattr(self._numbers, name)

    def put(self: "TorchContract", value: Any) -> None:
        self._numbers = replace(self._numbers, **{name: value})
        policy = self._loss_scale.policy
        if isinstance(policy, TorchRule):
            self._loss_scale.configure(replace(policy, **{name: value}))

    return property(get, put)


class TorchContract(TorchGradScaler):
    """The interface of `torch.amp.GradScaler`, with Buoy's implementation."""

    _options: Options
    _names: Names
    _sharing: Sharing
    _loss_scale: Plan | Scale  # the scale, and the policy that moves it
    _numbers: TorchNumbers
    _iteration: Iteration
    _log: StepLog
    _hooks: Hooks
    _fp16: Fp16
    _family: list[Scaler]  # a scaler and its scale groups, which it updates with itself
    _per_optimizer_states: dict[int, Pending]  # type: ignore[assignment]

    # -- torch's five numbers ----------------------------------------------------------

    _growth_factor = _number("growth_factor")
    _backoff_factor = _number("backoff_factor")
    _growth_interval = _number("growth_interval")

    @property
    def _scale(self) -> torch.Tensor | None:
        return self._loss_scale.tensor

    @_scale.setter
    def _scale(self, tensor: torch.Tensor | None) -> None:
        if tensor is not None:  # torch's constructor sets None
            self._placed("_scale").replace_tensor(tensor)

    @property
    def _growth_tracker(self) -> torch.Tensor | None:
        return self._loss_scale.tracker

    @_growth_tracker.setter
    def _growth_tracker(self, tensor: torch.Tensor | None) -> None:
        if tensor is not None:
            self._placed("_growth_tracker").tracker = tensor

    # -- what belongs to it ------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        """The policy that moves the scale."""
        return self._loss_scale.policy if self._enabled else NoScaling()

    @property
    def trace(self) -> "Recorder | None":
        """The recorder; None if the run is not recorded, or by another rank."""
        return self._log.recorder

    def attach(self, extension: Extension) -> None:
        """Attach an extension, whose hooks are called in every iteration."""
        self._hooks.add(extension)

    def _extra(self) -> dict[str, Any]:
        """Return the attributes that a subclass or a user has added."""
        own = set(vars(TorchGradScaler("cpu")))
        for kind in type(self).__mro__:
            if kind.__module__.startswith("buoy."):
                own |= inspect.get_annotations(kind).keys()
        return {name: value for name, value in vars(self).items() if name not in own}

    # -- the scale ---------------------------------------------------------------------

    @property
    def _ranks(self) -> Ranks:
        """The ranks to agree with; they may be initialised after this scaler."""
        return self._sharing.ranks()

    def _placed(self, method: str) -> Scale:
        """Return the scale as it is now; raise if no loss was scaled yet."""
        scale = self._loss_scale
        if isinstance(scale, Plan):
            if not self._ranks.several:
                raise errors.before_scale(method)
            # A pipeline stage or a rank without a loss needs only the scale.
            scale = self._place(torch.device(self._device))
            self._iteration.assumed = True
        scale.follow()
        return scale

    def _place(self, device: torch.device) -> Scale:
        """Create the scale's tensors, or return the scale that has them."""
        scale = self._loss_scale
        if isinstance(scale, Plan):
            self._ranks.introduce(
                foresees="loss" in scale.policy.wants,
                in_schedule=self._iteration.in_schedule,
            )
            scale = scale.place(
                device,
                self._init_scale,
                self._init_growth_tracker,
                reads=self._options.sync != "never",
            )
            self._loss_scale = scale
            backend.self_test(device)
        return scale

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        if not isinstance(self._loss_scale, Plan):
            message = "_growth_tracker initialized before _scale"
            raise AssertionError(message)  # noqa: TRY004 - as in torch
        self._place(torch.device(dev))

    def _check_scale_growth_tracker(
        self, funcname: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scale = self._placed(funcname)
        return scale.tensor, scale.tracker

    def get_scale(self) -> float:
        """Return the scale; 1.0 if the scaler is disabled."""
        self._flush()
        return super().get_scale()

    def _get_growth_tracker(self) -> int:
        if not self._enabled:
            return 0
        if isinstance(self._loss_scale, Plan):
            return self._init_growth_tracker
        return checkpoint.clean_steps(self._loss_scale.plain_state())

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
        """Set one of torch's numbers, here and in the policy."""
        if not self._enabled:
            return
        self._flush()
        check_factor(name, value)
        policy: Any = self._loss_scale.policy
        if name not in {field.name for field in fields(policy)}:
            raise OptionError(
                f"The policy {type(policy).__name__} has no `{name}`, so setting it "
                "would change nothing. Use `policy=None` for torch's rule, or "
                "'backoff', which has all three."
            )
        self._loss_scale.configure(replace(policy, **{name: value}))
        setattr(self, f"_{name}", value)

    # -- scaling a loss ----------------------------------------------------------------

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss, or every tensor of an iterable, by the scale."""
        if not self._enabled:
            return outputs
        if not isinstance(outputs, torch.Tensor):
            return map_nested(self.scale, outputs)
        if torch.compiler.is_dynamo_compiling():
            from buoy.torch.features import compiled  # noqa: PLC0415 - a feature

            return compiled.scale(self, outputs)
        tensor = self._note_loss(outputs).tensor
        if tensor.device != outputs.device:
            tensor = tensor.to(device=outputs.device, non_blocking=True)
        scaled = outputs * tensor
        for hook in self._hooks.loss_scaled:
            hook(outputs, scaled)
        return scaled

    def _note_loss(self, loss: torch.Tensor) -> Scale:
        """Keep a loss, and show the first of an iteration to the policy."""
        self._flush()
        scale = self._place(loss.device)
        scale.follow()
        self._expect_backward()
        has_value = self._iteration.add_loss(loss)
        if has_value and self._iteration.scalings == 1:  # then it must not change
            self._foresee(loss)
            scale = self._place(loss.device)
        return scale

    def _foresee(self, loss: torch.Tensor | None) -> None:
        """Show an iteration's first loss, the largest of all ranks, to the policy."""
        scale = self._loss_scale
        if "loss" not in scale.policy.wants or isinstance(scale, Plan):
            return
        if self._iteration.in_schedule and self._ranks.several:
            return  # other stages would not join
        if not scale.has_foreseen:
            scale.has_foreseen = True
            loss = self._ranks.largest_loss(loss, scale.device)
            if loss is not None:
                self._loss_scale = scale.foresee(loss)

    def _expect_backward(self) -> None:
        """Another loss is scaled: gradients that were inspected may change."""
        for pending in self._per_optimizer_states.values():
            if pending.freshness is not None:
                pending.freshness.expect_backward()

    # -- unscaling and checking --------------------------------------------------------

    def _pending(self, optimizer: Any, method: str) -> Pending:
        """Return an optimizer's gradients; raise if `method` may not be called now."""
        if self._iteration.compiled_surveys:
            raise errors.untraced(errors.CLIPPED_IN_GRAPH)
        pending = self._per_optimizer_states[id(optimizer)]
        pending.optimizer = optimizer
        if pending.stage is OptState.STEPPED and self._iteration.deferred:
            self._flush()
            return self._pending(optimizer, method)
        step.check_call(self, pending, method)
        return pending

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide this optimizer's gradients by the scale, once, and check them."""
        if not self._enabled:
            return
        if self._options.managed:
            from buoy.torch.features import managed  # noqa: PLC0415 - a feature

            if managed.is_unscaled(self, optimizer):
                return
        scale = self._placed("unscale_")
        pending = self._pending(optimizer, "unscale_")
        if pending.stage is OptState.UNSCALED:
            raise errors.unscale_twice()
        step.unscale(self, scale, pending)

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> Flags:
        """Check and multiply the gradients; return a flag per device."""
        pending = self._per_optimizer_states.get(id(optimizer))
        if pending is None:
            pending = Pending()
        pending.optimizer = optimizer
        scale = self._loss_scale
        with torch.no_grad():
            gathered = step.gather_gradients(self, pending, allow_fp16=allow_fp16)
            if not isinstance(scale, Plan):
                inverse = inv_scale.reshape(()) if inv_scale.dim() else inv_scale
                step.inspect_if_due(self, scale, pending, inverse)
            return unscale_(
                gathered,
                inv_scale,
                found_inf,
                may_overflow=step.may_overflow(scale, inv_scale),
            )

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        scale = self._placed("_check_inf_per_device")
        pending = self._per_optimizer_states[id(optimizer)]
        pending.optimizer = optimizer
        if self._is_overridden("_unscale_grads_"):
            one = torch.ones_like(scale.tensor)
            zero = torch.zeros_like(scale.tensor)
            pending.flags = self._unscale_grads_(optimizer, one, zero, True)
            pending.agreed = False
        else:
            with torch.no_grad():
                step.gather_gradients(self, pending, allow_fp16=True)
                step.inspect_gradients(self, scale, pending)
        return self._found_inf_per_device(optimizer)

    def _found_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        step.agree(self, self._per_optimizer_states[id(optimizer)])
        return super()._found_inf_per_device(optimizer)

    def _warn_once(self, topic: str, message: str) -> None:
        """Warn, once for each topic."""

    def _why_no_gradients(self, optimizer: Any) -> str:  # noqa: ARG002
        """Return why no parameter has a gradient; empty if unknown."""
        return ""

    def _is_clipping_while_scaled(self) -> bool:
        """Return whether gradients are clipped while they are scaled."""
        return False

    def _is_overridden(self, method: str) -> bool:
        """Return whether a subclass outside of Buoy, or this object, replaces it."""
        if method in vars(self):
            return True
        owner = next(kind for kind in type(self).__mro__ if method in vars(kind))
        return not owner.__module__.startswith("buoy.")

    # -- stepping ----------------------------------------------------------------------

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale the gradients if needed, and step if all of them are finite.

        A closure returns the loss, or scales it and calls `backward` itself; each
        evaluation is checked and unscaled (docs/guides/closures.md).
        """
        if args or kwargs:
            from buoy.torch.features import closures  # noqa: PLC0415 - a feature

            if closures.given(args, kwargs):
                return closures.step(self, optimizer, args, kwargs)
        if not self._enabled:
            result = optimizer.step(*args, **kwargs)
            self._log.add_unscaled(optimizer)
            return result
        if torch.compiler.is_dynamo_compiling():
            from buoy.torch.features import compiled  # noqa: PLC0415 - a feature

            return compiled.step(self, optimizer)
        scale = self._placed("step")
        pending = self._pending(optimizer, "step")
        step.recheck(self, pending)
        for hook in self._hooks.before_step:
            hook(pending)
        if not self._iteration.scalings:
            self._refuse_stale()
        return step.take(self, scale, pending, args, kwargs)

    def _refuse_stale(self) -> None:
        """Raise for gradients of an earlier scale, if no loss was scaled elsewhere."""
        elsewhere = self._ranks.several or self._iteration.compiled_losses
        if self._iteration.ever_scaled and not elsewhere:
            raise errors.scaled_before_update()

    def _maybe_opt_step(
        self,
        optimizer: torch.optim.Optimizer,
        optimizer_state: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Step or skip an optimizer that does not take `found_inf`."""
        pending: Any = optimizer_state
        if not pending.flags:
            return None
        found = pending.flag(next(iter(pending.flags)))
        if self._options.sync == "never":
            with self._fp16.stepping(optimizer):
                return optimizers.undo(optimizer, found, args, kwargs)
        return optimizers.ask(pending, found, args, kwargs)

    # -- updating ----------------------------------------------------------------------

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Update the scale; call it once per iteration, after all steps."""
        if not self._enabled:
            self._log.norms.clear()
            self._log.open_gates(None)
        elif torch.compiler.is_dynamo_compiling():
            from buoy.torch.features import compiled  # noqa: PLC0415 - a feature

            compiled.update(self)
        elif self._options.managed and new_scale is None:
            from buoy.torch.features import managed  # noqa: PLC0415 - a feature

            managed.defer(self)
        else:
            self._flush()
            self._end_iteration(new_scale)

    def _flush(self) -> None:
        """Carry out a deferred update."""
        if self._iteration.deferred:
            self._end_iteration()

    def _end_iteration(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Update the scale, and those of all scale groups; then open the gates."""
        for hook in self._hooks.before_update:
            hook()
        busy = [one for one in self._family if one._per_optimizer_states]
        pendings = [x for one in busy for x in one._per_optimizer_states.values()]
        for one in busy:
            for pending in one._per_optimizer_states.values():
                step.agree(one, pending)
        if new_scale is None:
            if not any(pending.flags for pending in pendings):
                self._placed("update")
                raise errors.nothing_recorded()
        else:
            check_new_scale(new_scale, self._device, self._options)  # before all others
            busy = [self, *(one for one in busy if one is not self)]
        failures: list[Exception] = []
        for one in busy:  # if one of them raises, the others still end
            try:
                one._update(new_scale if one is self else None)
            except Exception as error:  # noqa: BLE001 - raised below
                failures.append(error)
        outcomes = [one.outcome for one in pendings if one.outcome is not None]
        try:
            self._log.open_gates(outcomes)
        finally:
            if failures:
                raise failures[0]

    def _update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Move this scale, or set it, and end the iteration."""
        scale = self._placed("update")
        pendings = list(self._per_optimizer_states.values())
        before = scale.note()
        turn = scale.turn
        evidence = None
        if new_scale is None:
            evidence = evidence_of(pendings, scale.device)
        else:
            scale = self._with(scale, new_scale)
        try:
            scale = scale.move(evidence)
            self._loss_scale = scale
            ended = Ended(
                pendings=pendings,
                stepped=[one.outcome for one in pendings if one.outcome is not None],
                evidence=evidence,
                losses=self._iteration.losses,
                step=turn,
                scale=before,
                next_scale=scale.note(),
                home=scale.device,
            )
            try:
                self._log.end(ended)
            finally:
                for hook in self._hooks.updated:
                    hook(pendings)
        finally:
            self._iteration.end()
            self._per_optimizer_states = defaultdict(Pending)

    def _with(self, scale: Scale, value: float | torch.Tensor) -> Scale:
        """Return the scale, set to this value."""
        if isinstance(scale.policy, NoScaling):
            raise OptionError(
                "The policy NoScaling has no scale of its own to set, so "
                "`update(new_scale)` would change nothing. Choose another policy, or "
                "leave `new_scale` out."
            )
        if not isinstance(value, torch.Tensor):
            scale.configure(self._widened(scale.policy, value))
        return scale.set(value)

    def _widened(self, policy: Policy, value: float) -> Policy:
        """Widen the default bounds of torch's rule to include a scale set by hand."""
        if not isinstance(policy, TorchRule) or self._options.has_bounds:
            return policy
        return replace(
            policy,
            min_scale=min(policy.min_scale, value),
            max_scale=max(policy.max_scale, value),
        )

    # -- saving ------------------------------------------------------------------------

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
        scale = self._loss_scale
        saved = checkpoint.checked(state_dict, scale.policy, self._options)
        self._hooks.load_state_dict(saved.parts)  # first: it may raise
        scale.configure(self._widened(scale.policy, saved.scale))
        for name in ("growth_factor", "backoff_factor", "growth_interval"):
            setattr(self, f"_{name}", getattr(saved, name))
        state, turn = checkpoint.restored(saved, scale)
        scale.restore(state, turn)
        scale.clipping = float(self._is_clipping_while_scaled())
        self._init_scale = saved.scale
        self._init_growth_tracker = saved.clean_steps
        # Gradients that were scaled or inspected before this are of another run.
        self._iteration.scalings = 0
        self._iteration.forget_losses()
        self._per_optimizer_states = defaultdict(Pending)
