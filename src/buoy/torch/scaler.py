"""`GradScaler`: torch's own, with the order of its calls and what Buoy adds to each.

This file holds the public surface.  What happens inside a call lives in the rooms
beside it: `survey` looks at gradients, `clip` clips them, `rule` moves the scale,
`apply` steps or does not, `report` and `watch` tell of it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from buoy._backends import torch as backend
from buoy._core.policies.policy import Policy
from buoy._core.spikes import SpikeGuard
from buoy._core.state import Verdict
from buoy.torch import (
    agree,
    apply,
    closures,
    groups,
    options,
    spikes,
    traced,
    words,
    words_beyond,
)
from buoy.torch.fingerprint import Look
from buoy.torch.halves import Fp16Params, Halves
from buoy.torch.joint import Joint
from buoy.torch.names import Names
from buoy.torch.persisting import Persisting
from buoy.torch.pipeline import scaled_loss
from buoy.torch.ranks import ProcessGroups, Ranks
from buoy.torch.rule import Evidence
from buoy.torch.scaling import scaled
from buoy.torch.takers import can_be_told
from buoy.torch.watch import OnStuck, Watch

if TYPE_CHECKING:
    import os

    from buoy.trace import Recorder

__all__ = ["GradScaler"]

# A group of a scaler is made with the same arguments, but for these.
_NOT_INHERITED = {
    "self", "__class__", "model", "named_parameters", "trace", "process_group"
}  # fmt: skip


class GradScaler(Persisting):
    """Scale the loss, check and unscale the gradients, step only if they are finite.

    A drop-in for `torch.amp.GradScaler`: its arguments come first and mean the same.
    The others are given by keyword:

    Args:
        policy: what moves the scale: None for torch's rule with the arguments before
            it, the name of a policy, or a policy object (see `buoy.policies`).
        min_scale, max_scale: bounds of torch's rule; 2^-24 and float32's maximum if
            not given.
        on_stuck: "warn", "raise" or a callable that takes a `Stuck`; fires once when
            `patience` steps in a row, or most of the last 4 x `patience`, are skipped.
        sync: "auto" asks the device once per step of an optimizer that does not take
            `found_inf`; "never" computes such steps and undoes them on the device.
        model, named_parameters: where the names of parameters come from.
        fp16_params: "master" keeps FP32 copies of FP16 parameters and updates those;
            "error" refuses them; None does as torch, which refuses all but fused ones.
        strict_torch: do as torch does even where torch is wrong (see docs/torch.md).
        trace: a file to record the run in, by rank 0, or a `buoy.trace.Recorder`.
        process_group: the ranks that hold one scale together: a process group,
            several, or a DeviceMesh; all ranks if not given, none for `()`.
        on_mismatch: "raise" where ranks hold different scales or counters, or "heal"
            by skipping that step and going on from the smallest (docs/scale-out.md).
        skip: "independent", or "joint": if one optimizer must not step, none does
            (see `group`).
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
        patience: int = 50,
        sync: Literal["auto", "never"] = "auto",
        model: torch.nn.Module | None = None,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        fp16_params: Fp16Params | None = None,
        strict_torch: bool = False,
        trace: "str | os.PathLike[str] | Recorder | None" = None,
        process_group: ProcessGroups = None,
        on_mismatch: Literal["raise", "heal"] = "raise",
        skip: groups.Skip = "independent",
        spike_guard: Literal["skip", "clip"] | SpikeGuard | None = None,
    ) -> None:
        made_with = {k: v for k, v in locals().items() if k not in _NOT_INHERITED}
        given = {name: made_with[name] for name in options.DEFAULTS}
        if enabled:
            options.check(given, strict=strict_torch)
        super().__init__(device, **given, enabled=enabled)
        self._made_with, self._strict = made_with, strict_torch
        self._last, self._gates, self._reports = None, [], {}
        self._untold = self._recorder = None
        alone = strict_torch and process_group is None
        self._ranks, self._piped = Ranks(() if alone else process_group), False
        self._open(joint=groups.joint(skip), guard=spikes.spike_guard(spike_guard))
        if self._enabled:
            self._settle_in(given, made_with)
            self._names = Names(model, named_parameters)
            if trace is not None:
                self._record(trace)

    def _settle_in(self, given: dict[str, Any], made_with: dict[str, Any]) -> None:
        """Set up what a scaler has that is not switched off."""
        low, high = made_with["min_scale"], made_with["max_scale"]
        policy = made_with["policy"]
        self._rule = options.rule(
            policy, given, low=low, high=high, strict=self._strict
        )
        if policy is not None:
            self._init_scale = float(self._rule.known(self) or 1.0)
        self._never_sync = options.never_syncs(made_with["sync"])
        self._heals = options.heals(made_with["on_mismatch"])
        self._halves = Halves(made_with["fp16_params"])
        self._watch = Watch(made_with["on_stuck"], made_with["patience"])
        self._turn = 0
        self._begin()
        if made_with["device"] == "cpu":
            backend.self_test(torch.device("cpu"))

    def _open(self, *, joint: bool, guard: SpikeGuard | None) -> None:
        """Set up what lies beyond one scale for one optimizer."""
        self._groups, self._waiting, self._guards, self._parts = {}, {}, [], {}
        self._unclaimed = {}
        self._parent, self._name, self._window, self._origins = None, "", None, None
        self._joint = Joint() if joint else None
        self._spikes = None if guard is None else spikes.Spikes(guard)
        self._extended = joint or guard is not None

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss, or every tensor of an iterable, by the scale."""
        if not self._enabled:
            return outputs
        if not isinstance(outputs, torch.Tensor):
            return scaled(self, outputs)
        if torch.compiler.is_compiling():
            return traced.scale(self, outputs)
        self._scalings += 1
        scale = self._scale
        if scale is None:
            self._lazy_init_scale_growth_tracker(outputs.device)
            scale, _ = self._check_scale_growth_tracker("scale")
        if backend.transforming():  # its tensors mean nothing once it is over
            return outputs * scale.to(outputs.device, non_blocking=True)
        if self._window is not None:
            self._window.begin()
        if self._guide.fresh or self._per_optimizer_states:
            self._notice(outputs)
        if outputs.numel() == 1 and not outputs.is_meta:
            self._losses.append(backend.noted(outputs))
            if "loss" in self._rule.wants:
                self._foresee(outputs.reshape(()))
        if scale.device != outputs.device:
            scale = scale.to(device=outputs.device, non_blocking=True)
        scaled_loss = outputs * scale
        if self._origins is not None:
            may_read = not self._never_sync
            self._origins.follow(self._name, scaled_loss, may_read=may_read)
        if self._window is not None:
            self._window.follow(scaled_loss)
        return scaled_loss

    def loss_fn(
        self, function: Callable[..., torch.Tensor]
    ) -> Callable[..., torch.Tensor]:
        """Wrap the loss function of a pipeline's schedule; call it on every stage.

        The schedule's losses stay what they are; gradients that flow out of them are
        multiplied by the scale.  Then `step` and `update` as always, on every stage.

        Example:
            >>> scaler = GradScaler("cpu", init_scale=8.0)
            >>> loss_fn = scaler.loss_fn(torch.nn.functional.mse_loss)
            >>> output = torch.ones(1, requires_grad=True)
            >>> loss = loss_fn(output, torch.zeros(1))
            >>> loss.backward()
            >>> loss.item(), output.grad.item()
            (1.0, 16.0)
        """
        self._piped = True
        return scaled_loss(self, function) if self._enabled else function

    def _notice(self, loss: torch.Tensor) -> None:
        """Look at a loss that comes too late, or that is one of the first."""
        if self._per_optimizer_states:
            self._expect_another()
        if self._guide.fresh:
            self._assumed = False
            self._guide.first_loss(self, loss)

    def _met(self, loss: torch.Tensor) -> torch.Tensor:
        """Take note of a loss; give the scale on its device."""
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(loss.device)
        self._notice(loss)
        self._losses.append(backend.noted(loss))
        return self._home_scale().to(loss.device, non_blocking=True)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide this optimizer's gradients by the scale, once, and check them."""
        if not self._enabled:
            return
        scale, _ = self._check_scale_growth_tracker("unscale_")
        record = self._per_optimizer_states[id(optimizer)]
        if record["stage"] is not OptState.READY:
            self._refuse_unscale(record, "unscale_")
        if len(self._per_optimizer_states) > 1:
            self._refuse_alias(optimizer, record)
        if "multiplier" in record:
            self._refuse_changed(record, "unscale_")
            self._write_multiplier(optimizer, record)
            return
        found = torch.zeros_like(scale)
        flags = self._unscale_grads_(optimizer, self._inverse(scale), found, False)
        self._agree(record, flags)
        record["stage"] = OptState.UNSCALED
        record["groups"] = optimizer.param_groups
        if not self._strict and "stepping" not in record:
            record["looked"] = Look(optimizer)

    def step(
        self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
    ) -> float | None:
        """Unscale if that has not been done, and step if every gradient is finite.

        With a closure, as LBFGS and SAM need one, each of its evaluations is scaled,
        checked and unscaled; it returns the loss, or scales and calls `backward` itself
        (see docs/closures.md).
        """
        if not self._enabled:
            result: float | None = closures.plain_step(optimizer, args, kwargs)
            self._report_unscaled(optimizer)
            return result
        if (args or kwargs) and closures.wanted(self, args, kwargs):
            return closures.step(self, optimizer, args, kwargs)
        if torch.compiler.is_compiling():
            return traced.step(self, optimizer)
        self._check_scale_growth_tracker("step")
        record = self._per_optimizer_states[id(optimizer)]
        if record["stage"] is OptState.STEPPED:
            raise words.step_twice()
        if len(self._per_optimizer_states) > 1:
            self._refuse_alias(optimizer, record)
        self._guide.before_step(self, optimizer)
        if "looked" in record:
            self._refuse_changed(record, "step")
        scale = self._frozen_scale()
        if self._window is not None:
            raise words_beyond.window_open("step")
        if self._extended:
            self._prepare(optimizer, record)
        if can_be_told(optimizer):
            result = apply.handed_over(self, optimizer, record, args, kwargs)
        else:
            if record["stage"] is OptState.READY:
                record["stepping"] = True
                self.unscale_(optimizer)
            self._settle(record)
            if not record["found_inf_per_device"]:
                self._report(optimizer, record, scale).judged(Verdict.NO_GRADS)
                raise words.no_gradients(self._guide.why_no_gradients(optimizer))
            result = self._maybe_opt_step(optimizer, record, *args, **kwargs)
        record["stage"] = OptState.STEPPED
        record.pop("looked", None)
        self._report(optimizer, record, scale)
        return result

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Move the scale; call it once per iteration, after all have stepped."""
        if not self._enabled:
            for gate in self._gates:
                gate.advance()
            return
        if torch.compiler.is_compiling():
            traced.update(self)
            return
        if self._window is not None:
            raise words_beyond.window_open("update")
        if self._parent is not None:
            raise words_beyond.group_update(self._name)
        if self._joint is not None or self._guards:
            self._decide_together()
        if self._groups:
            self._update_family(new_scale)
        else:
            self._update_alone(new_scale)

    def _update_alone(self, new_scale: float | torch.Tensor | None) -> None:
        self._check_scale_growth_tracker("update")
        evidence = None
        if new_scale is not None:
            self._set_scale(new_scale)
        else:
            evidence = self._evidence()
        try:
            if self._healing is not None:
                agree.heal(self, *self._healing)
            elif evidence is not None:
                self._rule.move(self, evidence)
            self._conclude(evidence)
        finally:
            self._scalings = 0
            self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)

    def _evidence(self) -> Evidence:
        """Put together what all optimizers of this iteration showed."""
        states = self._per_optimizer_states
        if len(states) == 1 and not self._rule.wants:  # the case to be quick about
            (record,) = states.values()
            flags = record["found_inf_per_device"]
            found = flags.get(self._home())
            plain = found is not None and len(flags) == 1 and not found.dim()
            if plain and "pending" not in record and "own" not in record:
                return Evidence(found, record.get("finite"))
        for record in states.values():
            self._settle(record)
        records = [record for record in states.values() if apply.own(record)]
        if not records:
            raise words.nothing_recorded()
        home = self._home()
        found = apply.total([apply.own(record) for record in records], home)
        outcomes = [apply.outcome(record, home) for record in records]
        finite = None if None in outcomes else all(outcomes)
        if not self._rule.wants:
            return Evidence(found, finite)
        return Evidence(found, finite, **apply.largest(records))
