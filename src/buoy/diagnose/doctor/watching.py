"""See what a program does with scalers, optimizers and schedulers, and note it.

Methods are wrapped where their classes keep them, so it does not matter how a program
spells its imports, or which library calls them for it.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler as TorchGradScaler
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from buoy._backends.torch.gradients import parameters_of
from buoy._core.bounds import bounds_of
from buoy.diagnose.doctor.facts import Facts, ScalerFacts
from buoy.diagnose.doctor.losses import Losses
from buoy.diagnose.doctor.patches import Patches, place, scalers, schedulers
from buoy.diagnose.doctor.steps import Steps
from buoy.torch import GradScaler

__all__ = ["Enough", "Watching"]

_FORCED = 10  # the attempt that `force_skip` lets overflow if none has by then
_CLIPS = ("clip_grad_norm_", "clip_grad_value_")

# Names of wrapped calls that have others inside them.
_SCALER_STEPS = "scaler steps"
_SCALER_CLIPS = "scaler clips"
_MAKE_SCHEDULER = "make scheduler"


class Enough(BaseException):
    """As many steps have been seen as were asked for."""


@dataclass(slots=True)
class _KnownScaler:
    scaler: TorchGradScaler  # held, so that its id stays its own
    facts: ScalerFacts = field(default_factory=ScalerFacts)


class Watching:
    """Notes facts while it is installed; raises `Enough` after `most` steps."""

    def __init__(self, most: int | None = None, *, force_skip: bool = False) -> None:
        self.facts = Facts()
        self._most = most
        self._force_skip = force_skip
        self._patches = Patches()
        self._losses = Losses(self.facts)
        self._steps = Steps(self.facts)
        self._scalers: dict[int, _KnownScaler] = {}  # by id
        self._skips = 0

    def install(self) -> None:
        """Start watching."""
        self._watch_scalers()
        self._watch_schedulers()
        self._watch_clips()
        put = self._patches.attribute
        put(torch.autograd, "backward", self._backward, self._computed)
        put(torch.autocast, "__enter__", self._autocast)
        put(Optimizer, "__init__", after=self._optimizer_made)
        for handle in (
            register_optimizer_step_pre_hook(self._before_own_step),
            register_optimizer_step_post_hook(self._after_own_step),
            *self._losses.modules.hooks(),
        ):
            self._patches.also(handle.remove)

    def _watch_scalers(self) -> None:
        kinds = scalers()
        put = self._patches.method
        put(kinds, "__init__", after=self._made, label="make scaler")
        put(kinds, "scale", after=self._scaled)
        put(kinds, "unscale_", self._before_unscale, self._unscaled)
        for name in _CLIPS:
            put(kinds, name, self._before_unscale, self._unscaled, label=_SCALER_CLIPS)
        put(kinds, "step", self._before_step, self._after_step, label=_SCALER_STEPS)
        put(kinds, "update", self._before_update, self._after_update)

    def _watch_schedulers(self) -> None:
        kinds = schedulers()
        self._patches.method(kinds, "__init__", label=_MAKE_SCHEDULER)
        self._patches.method(kinds, "step", after=self._scheduled)

    def _watch_clips(self) -> None:
        for name in _CLIPS:
            original = getattr(torch.nn.utils.clip_grad, name)
            for home in (torch.nn.utils.clip_grad, torch.nn.utils):
                self._patches.put(home, name, self._clipping(original))

    def _clipping(self, original: Callable[..., object]) -> Callable[..., object]:
        @wraps(original)
        def clip(
            parameters: torch.Tensor | Iterable[torch.Tensor], *args: Any, **kwargs: Any
        ) -> object:
            if isinstance(parameters, torch.Tensor):
                params = [parameters]
            else:
                params = list(parameters)  # a generator can be read only once
            if not {_SCALER_STEPS, _SCALER_CLIPS} & set(self._patches.running):
                self._losses.clipped(params)
            return original(params, *args, **kwargs)

        return clip

    def remove(self) -> Facts:
        """Stop watching; return the facts."""
        self._patches.remove()
        self._losses.conclude(self._steps.held())
        for known in self._scalers.values():
            known.facts.scale = float(known.scaler.get_scale())
            known.facts.floor = _floor_of(known.scaler)
        return self.facts

    # -- scalers ----------------------------------------------------------------------

    def _made(
        self, _: None, scaler: TorchGradScaler, *__: object, **___: object
    ) -> None:
        if scaler.is_enabled():
            self._of(scaler).made_at = place()

    def _of(self, scaler: TorchGradScaler) -> ScalerFacts:
        """Return the facts about a scaler, which may be a new one."""
        if id(scaler) not in self._scalers:
            known = _KnownScaler(scaler)
            self.facts.scalers.append(known.facts)
            self._scalers[id(scaler)] = known
        return self._scalers[id(scaler)].facts

    def _scaled(self, result: Any, scaler: TorchGradScaler, outputs: object) -> None:
        if scaler.is_enabled() and isinstance(outputs, torch.Tensor):
            self._of(scaler).fresh = False
            self._losses.scaled(result, outputs, float(scaler.get_scale()))

    def _before_unscale(
        self, scaler: TorchGradScaler, optimizer: Optimizer, *_: object, **__: object
    ) -> None:
        if scaler.is_enabled() and not self._within_scaler():
            self._check_stage(scaler, optimizer)
            self._losses.before_unscaling(optimizer, scaler._scale)
            self._maybe_overflow(scaler, optimizer)

    def _unscaled(
        self,
        _: object,
        scaler: TorchGradScaler,
        optimizer: Optimizer,
        *__: object,
        **___: object,
    ) -> None:
        if scaler.is_enabled():
            self._losses.marks.put(parameters_of(optimizer), "unscaled")

    def _check_stage(self, scaler: TorchGradScaler, optimizer: Optimizer) -> None:
        """Note a step, or an unscale, that an update should have come before."""
        record = scaler._per_optimizer_states.get(id(optimizer))
        if record is not None and record["stage"] is OptState.STEPPED:
            own = self._of(scaler)
            own.updates_missing += 1
            own.step_at = place()

    def _before_step(
        self, scaler: TorchGradScaler, optimizer: Optimizer, *_: object, **__: object
    ) -> None:
        self._steps.of(optimizer).step_at = place()
        if not scaler.is_enabled():
            return
        own = self._of(scaler)
        own.fresh = False
        own.step_at = place()
        self._check_stage(scaler, optimizer)
        self._losses.before_unscaling(optimizer, scaler._scale)
        self._maybe_overflow(scaler, optimizer)

    def _maybe_overflow(self, scaler: TorchGradScaler, optimizer: Optimizer) -> None:
        """Let one step be skipped, if asked to, to see what a scheduler does then."""
        if not self._force_skip or self._skips:
            return
        attempt = self._steps.of(optimizer).steps + 1
        if attempt != _FORCED:
            return
        record = scaler._per_optimizer_states.get(id(optimizer))
        if record is not None and record["found_inf_per_device"]:
            return  # checked already: an inf now would reach the weights
        if not self._steps.has_scheduler(optimizer):
            return
        for param in parameters_of(optimizer):
            grad = param.grad
            if type(grad) is torch.Tensor and not grad.is_sparse and grad.numel():
                first = (0,) * grad.dim()
                grad.detach()[first] = math.inf
                return

    def _after_step(
        self,
        _: object,
        scaler: TorchGradScaler,
        optimizer: Optimizer,
        *__: object,
        **___: object,
    ) -> None:
        skipped = False
        if scaler.is_enabled():
            own = self._of(scaler)
            record = scaler._per_optimizer_states[id(optimizer)]
            flags = record["found_inf_per_device"].values()
            skipped = any(bool(flag.item()) for flag in flags)
            own.steps += 1
            own.skipped += skipped
            own.skipped_row = own.skipped_row + 1 if skipped else 0
            self._skips += skipped
            self._losses.marks.put(parameters_of(optimizer), "unscaled")
        self._steps.stepped(optimizer, skipped=skipped)

    def _before_update(self, scaler: TorchGradScaler, new_scale: object = None) -> None:
        if not scaler.is_enabled():
            return
        own = self._of(scaler)
        if own.fresh and own.updates and new_scale is None:
            own.updates_doubled += 1
            own.update_at = place()

    def _after_update(
        self, _: None, scaler: TorchGradScaler, new_scale: object = None
    ) -> None:
        del new_scale
        if scaler.is_enabled():
            own = self._of(scaler)
            own.updates += 1
            own.fresh = True
        self._maybe_end()

    # -- everything else --------------------------------------------------------------

    def _maybe_end(self) -> None:
        if self._most is not None and self.facts.steps >= self._most:
            raise Enough

    def _within_scaler(self) -> bool:
        return _SCALER_STEPS in self._patches.running

    def _optimizer_made(
        self, _: None, optimizer: Optimizer, *__: object, **___: object
    ) -> None:
        self._steps.of(optimizer)

    def _before_own_step(
        self, optimizer: Optimizer, args: object, kwargs: object
    ) -> None:
        """Note a step that is applied without the scaler."""
        del args, kwargs
        if self._within_scaler():
            return
        own = self._steps.of(optimizer)
        own.step_at = place()
        if self._losses.marks.any(parameters_of(optimizer), "scaled", "unscaled"):
            own.direct += 1
            own.direct_at = place()

    def _after_own_step(
        self, optimizer: Optimizer, args: object, kwargs: object
    ) -> None:
        del args, kwargs
        if self._within_scaler():
            return
        self._steps.stepped(optimizer, skipped=False)
        if not any(scaler.updates for scaler in self.facts.scalers):
            self._maybe_end()

    def _scheduled(
        self, _: None, scheduler: LRScheduler, *__: object, **___: object
    ) -> None:
        if _MAKE_SCHEDULER not in self._patches.running:  # that is its own first step
            self._steps.scheduled(scheduler)

    def _autocast(self, context: torch.autocast) -> None:
        if getattr(context, "_enabled", False):
            self.facts.autocast.add(str(context.fast_dtype).removeprefix("torch."))

    def _backward(self, tensors: object, *_: object, **__: object) -> None:
        self._steps.before_backward()
        self._losses.before_backward(_roots(tensors))

    def _computed(self, _: None, tensors: object, *__: object, **___: object) -> None:
        self._steps.after_backward()
        self._losses.after_backward(_roots(tensors))


def _floor_of(scaler: TorchGradScaler) -> float:
    """Return the lowest scale of a scaler of Buoy; torch's own has none: 0."""
    return bounds_of(scaler.policy).low if isinstance(scaler, GradScaler) else 0.0


def _roots(tensors: object) -> list[torch.Tensor]:
    """List the tensors that a backward pass starts from; graph edges are left out."""
    listed = tensors if isinstance(tensors, (list, tuple)) else [tensors]
    return [root for root in listed if isinstance(root, torch.Tensor)]
