"""See what a program does with scalers, optimizers and schedulers, and note it.

Methods are wrapped where their classes keep them, so it does not matter how a program
spells its imports, or which library calls them for it.
"""

import math
from functools import wraps
from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.optim import optimizer as optim

from buoy._backends.torch.gradients import parameters_of
from buoy.diagnose.doctor.facts import Facts, ScalerFacts
from buoy.diagnose.doctor.losses import Losses
from buoy.diagnose.doctor.patches import Patches, place, scalers, schedulers
from buoy.diagnose.doctor.steps import Steps

__all__ = ["Enough", "Watching"]

_FORCED = 10  # the attempt that `force_skip` lets overflow if none has by then


class Enough(BaseException):
    """As many steps have been seen as were asked for."""


class Watching:
    """Notes facts while it is installed; raises `Enough` after `most` steps."""

    def __init__(self, most: int | None = None, *, force_skip: bool = False) -> None:
        self.facts = Facts()
        self._most, self._force_skip = most, force_skip
        self._patches = Patches()
        self._losses, self._steps = Losses(self.facts), Steps(self.facts)
        self._scalers: dict[int, tuple[Any, ScalerFacts]] = {}
        self._skips = 0

    def install(self) -> None:
        """Start watching."""
        patches, kinds, steppers = self._patches, scalers(), schedulers()
        patches.method(kinds, "__init__", after=self._made, label="make scaler")
        patches.method(kinds, "scale", after=self._scaled)
        patches.method(kinds, "unscale_", self._before_unscale, self._unscaled)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            patches.method(
                kinds, name, self._before_unscale, self._unscaled, label="scaler clips"
            )
        patches.method(
            kinds, "step", self._before_step, self._after_step, label="scaler steps"
        )
        patches.method(kinds, "update", self._before_update, self._after_update)
        patches.attribute(torch.autograd, "backward", self._backward, self._computed)
        patches.attribute(torch.optim.Optimizer, "__init__", after=self._optimizer_made)
        patches.attribute(torch.autocast, "__enter__", self._autocast)
        patches.method(steppers, "__init__", label="make scheduler")
        patches.method(steppers, "step", after=self._scheduled)
        self._watch_clips()
        for handle in (
            optim.register_optimizer_step_pre_hook(self._before_own_step),
            optim.register_optimizer_step_post_hook(self._after_own_step),
            *self._losses.modules.hooks(),
        ):
            patches.also(handle.remove)

    def _watch_clips(self) -> None:
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            original = getattr(torch.nn.utils.clip_grad, name)
            for home in (torch.nn.utils.clip_grad, torch.nn.utils):
                self._patches.put(home, name, self._clipping(original))

    def _clipping(self, original: Any) -> Any:
        @wraps(original)
        def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            single = isinstance(parameters, torch.Tensor)
            # As a list: a generator can be read only once.
            params = [parameters] if single else list(parameters)
            if not {"scaler steps", "scaler clips"} & set(self._patches.running):
                self._losses.clipped(params)
            return original(params, *args, **kwargs)

        return clip

    def remove(self) -> Facts:
        """Stop watching; give the facts."""
        self._patches.remove()
        self._losses.conclude(self._steps.held())
        for scaler, own in self._scalers.values():
            own.scale = float(scaler.get_scale())
            low = getattr(getattr(scaler, "_loss_scale", None), "low", 0.0)
            own.floor = low if math.isfinite(low) and low > 0 else 0.0
        return self.facts

    # -- scalers ----------------------------------------------------------------------

    def _made(self, _: Any, scaler: Any, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        if scaler.is_enabled():
            self._of(scaler).made_at = place()

    def _of(self, scaler: Any) -> ScalerFacts:
        if id(scaler) not in self._scalers:
            facts = ScalerFacts()
            self.facts.scalers.append(facts)
            self._scalers[id(scaler)] = (scaler, facts)
        return self._scalers[id(scaler)][1]

    def _scaled(self, result: Any, scaler: Any, outputs: Any) -> None:
        if scaler.is_enabled() and isinstance(outputs, torch.Tensor):
            self._of(scaler).fresh = False
            self._losses.scaled(result, outputs, float(scaler.get_scale()))

    def _before_unscale(self, scaler: Any, optimizer: Any, *_: Any, **__: Any) -> None:
        if scaler.is_enabled() and not self._within_scaler():
            self._check_stage(scaler, optimizer)
            self._losses.before_unscaling(optimizer, scaler._scale)
            self._maybe_overflow(scaler, optimizer)

    def _unscaled(
        self, _: Any, scaler: Any, optimizer: Any, *__: Any, **___: Any
    ) -> None:
        if scaler.is_enabled():
            self._losses.marks.put(parameters_of(optimizer), "unscaled")

    def _check_stage(self, scaler: Any, optimizer: Any) -> None:
        """Note a step, or an unscale, that an update should have come before."""
        record = scaler._per_optimizer_states.get(id(optimizer))
        if record is not None and record["stage"] is OptState.STEPPED:
            own = self._of(scaler)
            own.updates_missing += 1
            own.step_at = place()

    def _before_step(self, scaler: Any, optimizer: Any, *_: Any, **__: Any) -> None:
        self._steps.of(optimizer).step_at = place()
        if not scaler.is_enabled():
            return
        own = self._of(scaler)
        own.fresh, own.step_at = False, place()
        self._check_stage(scaler, optimizer)
        self._losses.before_unscaling(optimizer, scaler._scale)
        self._maybe_overflow(scaler, optimizer)

    def _maybe_overflow(self, scaler: Any, optimizer: Any) -> None:
        """Let one step be skipped, if asked to, to see what a scheduler does then."""
        if not self._force_skip or self._skips:
            return
        if self._steps.of(optimizer).steps + 1 != _FORCED:
            return
        record = scaler._per_optimizer_states.get(id(optimizer))
        if record is not None and record["found_inf_per_device"]:
            return  # checked already: an inf now would reach the weights
        if not self._steps.has_scheduler(optimizer):
            return
        for param in parameters_of(optimizer):
            grad = param.grad
            if type(grad) is torch.Tensor and not grad.is_sparse and grad.numel():
                grad.detach()[(0,) * grad.dim()] = math.inf
                return

    def _after_step(
        self, _: Any, scaler: Any, optimizer: Any, *__: Any, **___: Any
    ) -> None:
        skipped = False
        if scaler.is_enabled():
            own, record = self._of(scaler), scaler._per_optimizer_states[id(optimizer)]
            flags = record["found_inf_per_device"].values()
            skipped = any(bool(flag.item()) for flag in flags)
            own.steps += 1
            own.skipped += skipped
            own.skipped_row = own.skipped_row + 1 if skipped else 0
            self._skips += skipped
            self._losses.marks.put(parameters_of(optimizer), "unscaled")
        self._steps.stepped(optimizer, skipped=skipped)

    def _before_update(self, scaler: Any, new_scale: Any = None) -> None:
        if not scaler.is_enabled():
            return
        own = self._of(scaler)
        if own.fresh and own.updates and new_scale is None:
            own.updates_doubled += 1
            own.update_at = place()

    def _after_update(self, _: Any, scaler: Any, new_scale: Any = None) -> None:
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
        return "scaler steps" in self._patches.running

    def _optimizer_made(self, _: Any, optimizer: Any, *__: Any, **___: Any) -> None:
        self._steps.of(optimizer)

    def _before_own_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        del args, kwargs
        if self._within_scaler():
            return
        own = self._steps.of(optimizer)
        own.step_at = place()
        if self._losses.marks.any(parameters_of(optimizer), "scaled", "unscaled"):
            own.direct += 1
            own.direct_at = place()

    def _after_own_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        del args, kwargs
        if self._within_scaler():
            return
        self._steps.stepped(optimizer, skipped=False)
        if not any(scaler.updates for scaler in self.facts.scalers):
            self._maybe_end()

    def _scheduled(self, _: Any, scheduler: Any, *__: Any, **___: Any) -> None:
        if "make scheduler" not in self._patches.running:  # that is its own first step
            self._steps.scheduled(scheduler)

    def _autocast(self, context: Any) -> None:
        if getattr(context, "_enabled", False):
            self.facts.autocast.add(str(context.fast_dtype).rpartition(".")[2])

    def _backward(self, tensors: Any, *_: Any, **__: Any) -> None:
        self._steps.before_backward()
        self._losses.before_backward(_listed(tensors))

    def _computed(self, _: Any, tensors: Any, *__: Any, **___: Any) -> None:
        self._steps.after_backward()
        self._losses.after_backward(_listed(tensors))


def _listed(tensors: Any) -> list[Any]:
    return list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
