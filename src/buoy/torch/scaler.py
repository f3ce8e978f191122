"""`GradScaler`: the constructor, and the methods that Buoy adds to torch's.

Torch's own methods are in `contract`.  Most methods here belong to a feature and make
one call into `buoy.torch.features`.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, TypeVar

import torch
from torch.amp.grad_scaler import OptState

from buoy._backends import torch as backend
from buoy._backends.torch.collectives import NormGroup, ProcessGroups
from buoy._backends.torch.gradients import clamp_, gather, parameters_of
from buoy._backends.torch.losses import scale_gradient
from buoy._backends.torch.names import Names
from buoy._core.errors import OptionError
from buoy._core.policies.policy import Policy
from buoy._core.spikes import SpikeGuard
from buoy._core.watch import PATIENCE, OnStuck
from buoy.torch import errors, step
from buoy.torch.contract import TorchContract, TorchGradScaler
from buoy.torch.distributed import Sharing
from buoy.torch.features import compiled, groups, guard, rerun
from buoy.torch.features.hints import Hints
from buoy.torch.features.joint import Joint
from buoy.torch.features.masters import Fp16Parameters
from buoy.torch.features.spikes import Spikes
from buoy.torch.gates import AdvanceOn, make_gates
from buoy.torch.hooks import Hooks
from buoy.torch.iteration import Iteration
from buoy.torch.options import Fp16Params, Options, checked_clip, checked_threshold
from buoy.torch.outcome import LastStep
from buoy.torch.pending import Pending
from buoy.torch.step_log import StepLog

if TYPE_CHECKING:
    import os

    from buoy.trace import Recorder

__all__ = ["GradScaler"]

_R = TypeVar("_R")


class GradScaler(TorchContract):
    """Scale the loss, check and unscale the gradients, step only if they are finite.

    A drop-in replacement for `torch.amp.GradScaler`: torch's arguments come first and
    mean the same.  The others are keyword-only:

    Args:
        policy: the rule that moves the scale: None for torch's rule with the arguments
            above, the name of a policy, or a policy object (see `buoy.policies`).
        min_scale, max_scale: bounds of torch's rule (2^-24 and float32's maximum).
        on_stuck: "warn", "raise" or a callable that takes a `Stuck`; called once when
            `patience` steps in a row, or most of the last 4 x `patience`, are skipped.
        sync: "auto" reads from the device once per step of an optimizer that does not
            take `found_inf`; "never" restores skipped steps on the device.
        model, named_parameters: the source of parameter names in messages.
        fp16_params: "master" keeps FP32 copies of FP16 parameters and updates those;
            "error" raises; None raises, as torch does, unless the optimizer is fused.
        trace: a file in which rank 0 records the run, or a `buoy.trace.Recorder`.
        process_group: the ranks that share one scale: a process group, several, or a
            DeviceMesh; all ranks by default, none for `()`.
        norm_group: the process group over which the norms of plain parameters that
            are not replicas are summed, or a function from a parameter to it.
        skip: "independent", or "joint": if one optimizer's step is skipped, all are.
        managed: True if a training library calls the scaler (docs/migrate/trainers.md).
        spike_guard: "skip" or "clip" steps whose norm is an outlier, or a `SpikeGuard`.

    Example:
        >>> layer = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> scaler = GradScaler("cpu", init_scale=2.0**8)
        >>> scaler.scale(layer(torch.ones(4, 2)).sum()).backward()
        >>> norm = scaler.clip_grad_norm_(optimizer, 1.0)
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> scaler.last_step.applied
        True
    """

    _hints: Hints

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        policy: str | Policy | None = None,
        min_scale: float | None = None,
        max_scale: float | None = None,
        on_stuck: OnStuck = "warn",
        patience: int = PATIENCE,
        sync: Literal["auto", "never"] = "auto",
        model: torch.nn.Module | None = None,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        fp16_params: Fp16Params | None = None,
        trace: "str | os.PathLike[str] | Recorder | None" = None,
        process_group: ProcessGroups = None,
        norm_group: NormGroup = None,
        skip: Literal["independent", "joint"] = "independent",
        spike_guard: Literal["skip", "clip"] | SpikeGuard | None = None,
        managed: bool = False,
    ) -> None:
        options = Options(
            device=device,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
            policy=policy,
            min_scale=min_scale,
            max_scale=max_scale,
            on_stuck=on_stuck,
            patience=patience,
            sync=sync,
            fp16_params=fp16_params,
            skip=skip,
            spike_guard=spike_guard,
            managed=managed,
        )
        names = Names(model, named_parameters) if enabled else Names()
        self._assemble(options, names, Sharing(process_group, norm_group))
        if self._enabled and trace is not None:
            from buoy.torch.features.record import record  # noqa: PLC0415 - seldom used

            record(self, trace)

    def _assemble(self, options: Options, names: Names, sharing: Sharing) -> None:
        """Create every attribute; also for copies, scale groups and pickles."""
        self._options = options
        self._names = names
        self._sharing = sharing
        plan = options.plan()
        policy = plan.policy
        self._loss_scale = plan
        self._numbers = options.numbers(policy)
        TorchGradScaler.__init__(self, **options.of_torch(policy))
        self._iteration = Iteration(checks_loss="loss_finite" in policy.wants)
        self._log = StepLog(names, options.on_stuck, options.patience)
        self._family = [self]
        if not self._enabled:
            self._hooks = Hooks(self)
            del self._loss_scale, self._numbers  # as in torch, which has none either
            return
        self._init_scale = float(plan.state.scale)
        self._per_optimizer_states = defaultdict(Pending)
        self._fp16 = Fp16Parameters(options.fp16_params)
        self._hints = Hints()
        self._hooks = Hooks(self, self._hints)
        if isinstance(options.spike_guard, SpikeGuard):
            self._hooks.add(Spikes(options.spike_guard))
        if options.skip == "joint":
            self._hooks.add(Joint())
        if options.device == "cpu":
            backend.self_test(torch.device("cpu"))

    def __repr__(self) -> str:
        """Return one line.  This waits for the scale, not for other numbers."""
        kind = type(self).__name__
        policy = self._options.policy
        watch = self._log.watch
        if not self._enabled:
            return f"{kind}(enabled=False)"
        name = policy if isinstance(policy, str | None) else type(policy).__name__
        return (
            f"{kind}(policy={name or 'torch'!r}, scale={self.get_scale():g}, "
            f"applied={watch.steps - watch.skips}, skipped={watch.skips})"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the options and the state dict, for a pickle or a copy."""
        self._flush()
        if self._enabled and self._per_optimizer_states:
            raise errors.mid_iteration()
        return {
            "options": self._options,
            "state": self.state_dict(),
            "groups": groups.options_of(self),
            "sharing": self._sharing,
            "extra": self._extra(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._assemble(state["options"], Names(), state["sharing"])
        self.__dict__.update(state["extra"])
        for name, options in state["groups"].items():
            groups.restore(self, name, options)
        if self._enabled:
            self.load_state_dict(state["state"])

    def _why_no_gradients(self, optimizer: Any) -> str:
        return self._hints.why_no_gradients(optimizer)

    def _is_clipping_while_scaled(self) -> bool:
        return self._hints.clipped

    def _warn_once(self, topic: str, message: str) -> None:
        """Warn, once for each topic."""
        self._hints.warn(topic, message)

    def loss_fn(
        self, function: Callable[..., torch.Tensor]
    ) -> Callable[..., torch.Tensor]:
        """Wrap the loss function of a pipeline schedule; call it on every stage.

        The schedule's losses do not change; the gradients that flow out of them are
        multiplied by the scale.  Call `step` and `update` on every stage as usual.

        Example:
            >>> scaler = GradScaler("cpu", init_scale=8.0)
            >>> loss_fn = scaler.loss_fn(torch.nn.functional.mse_loss)
            >>> output = torch.ones(1, requires_grad=True)
            >>> loss = loss_fn(output, torch.zeros(1))
            >>> loss.backward()
            >>> loss.item(), output.grad.item()
            (1.0, 16.0)
        """
        if not self._enabled:
            return function
        self._iteration.in_schedule = True

        def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
            loss = function(*args, **kwargs)
            scale = self._note_loss(loss).tensor
            return scale_gradient(loss, scale.to(loss.device))

        return wrapped

    def join_hook(self, **_: Any) -> NoReturn:
        """Raise: `Join([model, scaler])` is not supported."""
        raise OptionError(errors.JOIN)

    def clip_grad_norm_(
        self,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,  # noqa: ARG002 - as in torch
    ) -> torch.Tensor:
        """Clip the total norm of the unscaled gradients; return the norm before it.

        Call it between `backward()` and `step`, instead of `unscale_` and
        `torch.nn.utils.clip_grad_norm_`.  For an optimizer that takes `grad_scale`
        no gradient is written: clipping is part of `grad_scale`.  For others one
        multiplication unscales and clips.  The norm is inf or NaN if the step will be
        skipped; it is a tensor, and reading it waits.  `foreach` changes nothing.

        Example:
            >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
            >>> optimizer = torch.optim.SGD([weight], lr=0.1)
            >>> scaler = GradScaler("cpu")
            >>> scaler.scale((weight**2).sum()).backward()
            >>> scaler.clip_grad_norm_(optimizer, max_norm=1.0)
            tensor(10.)
        """
        several = self._enabled and self._ranks.several
        max_norm, order = checked_clip(max_norm, norm_type, ranks=several)
        if not self._enabled:
            some = [x for x in parameters_of(optimizer) if x.numel()]  # torch needs it
            norm = torch.nn.utils.clip_grad_norm_(
                some, max_norm, order, error_if_nonfinite
            )
            self._log.norms.setdefault(id(optimizer), norm)
            return norm
        if torch.compiler.is_dynamo_compiling():
            return compiled.clip(
                self, optimizer, max_norm, order, error=error_if_nonfinite
            )
        scale = self._placed("clip_grad_norm_")
        pending = self._pending(optimizer, "clip_grad_norm_")
        if pending.stage is OptState.READY and (
            self._is_overridden("unscale_") or self._is_overridden("_unscale_grads_")
        ):
            self.unscale_(optimizer)  # a subclass unscales in its own way
        return step.clip(
            self,
            scale,
            pending,
            max_norm,
            order,
            error_if_nonfinite=error_if_nonfinite,
        )

    def clip_grad_value_(
        self,
        optimizer: Any,
        clip_value: float,
        foreach: bool | None = None,  # noqa: ARG002 - as in torch
    ) -> None:
        """Clamp every unscaled gradient to [-clip_value, clip_value].

        Example:
            >>> weight = torch.nn.Parameter(torch.tensor([3.0, 0.2]))
            >>> optimizer = torch.optim.SGD([weight], lr=0.1)
            >>> scaler = GradScaler("cpu")
            >>> scaler.scale((weight**2).sum()).backward()
            >>> scaler.clip_grad_value_(optimizer, 1.0)
            >>> weight.grad
            tensor([1.0000, 0.4000])
        """
        limit = checked_threshold("clip_value", clip_value, wait=True)
        if self._enabled:
            self._placed("clip_grad_value_")
            pending = self._pending(optimizer, "clip_grad_value_")
            if pending.stage is OptState.READY and not self._ranks.several:
                self.clip_grad_norm_(optimizer, math.inf)  # measure before it changes
            if pending.stage is OptState.READY:
                self.unscale_(optimizer)
        with torch.no_grad():
            clamp_(gather(optimizer, summed=True), limit)

    @property
    def last_step(self) -> LastStep | None:
        """The outcome of the last step; None before the first."""
        if self._log.compiled is not None:
            compiled.report(self)
        return self._log.last

    def last_step_of(self, optimizer: Any) -> LastStep | None:
        """Return the outcome of this optimizer's last step; None before the first."""
        _ = self.last_step  # reads a compiled step, if there was one
        outcome = self._log.by_optimizer.get(id(optimizer))
        return outcome if outcome and outcome.optimizer is optimizer else None

    @property
    def spikes(self) -> int:
        """The number of steps that the spike guard has skipped or clipped."""
        found = self._hooks.find(Spikes)
        return 0 if found is None else found.count()

    def gate(
        self, *things: Any, optimizer: Any = None, advance_on: AdvanceOn = "applied"
    ) -> None:
        """Advance schedulers, averages and counters in `update`.

        Each is a callable, or has a `step()` or an `update()`.  It is called after
        applied steps, or after all steps with `advance_on="attempted"`.  One that
        belongs to an optimizer follows its steps; others follow all optimizers.  With
        an optimizer that takes `found_inf` this reads the device once per update.
        """
        self._log.gates += make_gates(things, optimizer, advance_on, self._names.model)

    def group(self, name: str, **options: Any) -> Self:
        """Return the scale group of this name; create it if there is none.

        A scale group is a scaler with its own scale.  Call `update` on this scaler
        only: it updates every scale group that stepped.  Options (`init_scale`, ...)
        are copied from it unless passed at first (docs/guides/several-losses.md).
        """
        made: Self = groups.group(self, name, options)
        return made

    def run(self, step_fn: Callable[[], _R], *optimizers: Any, retries: int = 6) -> _R:
        """Run a step; if it overflowed, run it again at a lower scale.

        `step_fn` computes the loss, scales it and calls `backward()`, and may clip.
        `run` then steps and updates, unless `step_fn` did.  After `retries` re-runs the
        batch is skipped (docs/guides/retry.md).
        """
        return rerun.run(self, step_fn, optimizers, retries)

    def guard(self, *models: torch.nn.Module) -> None:
        """Restore the buffers of these models when their step is skipped.

        `update` restores the values from before the iteration's first forward pass in
        training mode, without a host read (docs/guides/retry.md).
        """
        guard.guard(self, models)

    def measure_underflow(self, step_fn: Callable[[], Any], **options: Any) -> Any:
        """Measure the share of gradient values that underflow at the current scale.

        Runs the forward and backward pass of one batch twice, as is and in FP32, and
        compares value by value; training is not affected (docs/guides/diagnose.md).
        """
        diagnose = import_module("buoy.diagnose.underflow")
        return diagnose.measure_underflow(self, step_fn, **options)

    def doctor(self) -> Any:
        """Observe training in a `with` block, and report mistakes.

        Returns a `buoy.diagnose.Doctor`; print it afterwards (docs/guides/doctor.md).
        """
        return import_module("buoy.diagnose.doctor").Doctor()
