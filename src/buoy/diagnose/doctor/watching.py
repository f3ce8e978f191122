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

from buoy.diagnose.doctor.facts import (
    Facts,
    OptimizerFacts,
    ScalerFacts,
    SchedulerFacts,
)
from buoy.diagnose.doctor.gradients import Clearing, Looks, Marks
from buoy.diagnose.doctor.modules import Modules
from buoy.diagnose.doctor.patches import Patches, place, scalers, schedulers
from buoy.torch import holes
from buoy.torch.gather import parameters_of

__all__ = ["Enough", "Watching"]

_EVERY = 5  # scaled losses between two looks at the gradients
_FORCED = 10  # the attempt that is made to overflow if none has by then
_GRAPHS = 8  # of scaled losses that are remembered until backward


class Enough(BaseException):
    """As many steps have been seen as were asked for."""


class Watching:
    """Notes facts while it is installed; raises `Enough` after `most` steps."""

    def __init__(self, most: int | None = None) -> None:
        self.facts = Facts()
        self._most = most
        self._patches = Patches()
        self._marks, self._looks, self._modules = Marks(), Looks(), Modules()
        self._scalers: dict[int, tuple[Any, ScalerFacts]] = {}
        self._optimizers: dict[int, tuple[Any, OptimizerFacts, Clearing]] = {}
        self._schedulers: dict[int, tuple[Any, SchedulerFacts]] = {}
        self._known: dict[int, Any] = {}  # graphs of losses that were scaled
        self._pending: tuple[Any, list[torch.Tensor]] = (None, [])
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
            *self._modules.hooks(),
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
            if not isinstance(parameters, torch.Tensor):
                parameters = list(parameters)  # a generator can be read only once
            self._clipped(parameters)
            return original(parameters, *args, **kwargs)

        return clip

    def remove(self) -> Facts:
        """Stop watching; give the facts."""
        self._patches.remove()
        self._conclude()
        return self.facts

    def _conclude(self) -> None:
        facts, name_of = self.facts, self._modules.name_of
        held = {
            id(param)
            for optimizer, _, _ in self._optimizers.values()
            for param in parameters_of(optimizer)
        }
        facts.unheld = [
            name_of(param)
            for key, param in self._marks.reached.items()
            if key not in held
        ]
        facts.nonfinite_module = self._modules.first_nonfinite
        facts.underflow = {name_of(p): share for p, share in self._looks.shares()}
        for scaler, own in self._scalers.values():
            own.scale = float(scaler.get_scale())
            low = getattr(getattr(scaler, "_rule", None), "low", 0.0)
            own.floor = low if math.isfinite(low) and low > 0 else 0.0

    # -- scalers ----------------------------------------------------------------------

    def _made(self, _: Any, scaler: Any, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        if scaler.is_enabled():
            self._of_scaler(scaler).made_at = place()

    def _of_scaler(self, scaler: Any) -> ScalerFacts:
        if id(scaler) not in self._scalers:
            facts = ScalerFacts()
            self.facts.scalers.append(facts)
            self._scalers[id(scaler)] = (scaler, facts)
        return self._scalers[id(scaler)][1]

    def _scaled(self, result: Any, scaler: Any, outputs: Any) -> None:
        if not scaler.is_enabled() or not isinstance(outputs, torch.Tensor):
            return
        own = self._of_scaler(scaler)
        own.fresh = False
        own.scaled += 1
        self.facts.scaled_at = place()
        self._loss(outputs)
        if outputs.grad_fn is None:
            return
        reached, dtypes = holes.leaves(outputs)
        self._count(self.facts.scaled_losses, dtypes)
        self._marks.reach(reached)
        self._marks.put(reached, "scaled")
        self._known[id(result.grad_fn)] = result.grad_fn
        while len(self._known) > _GRAPHS:
            self._known.pop(next(iter(self._known)))
        self._pending = (result.grad_fn, reached)

    def _count(self, losses: dict[str, int], dtypes: set[torch.dtype]) -> None:
        name = "float32"
        for narrow in (torch.float16, torch.bfloat16):
            if narrow in dtypes:
                name = str(narrow).rpartition(".")[2]
                break
        losses[name] = losses.get(name, 0) + 1

    def _loss(self, loss: torch.Tensor) -> None:
        self.facts.losses += 1
        if not torch.isfinite(loss.detach()).all():
            self.facts.nonfinite_losses += 1
            self.facts.nonfinite_at = self.facts.nonfinite_at or place()
            self._modules.look_closely()

    def _before_unscale(self, scaler: Any, optimizer: Any, *_: Any, **__: Any) -> None:
        if scaler.is_enabled() and not self._within_scaler():
            self._check_stage(scaler, optimizer)
            self._maybe_overflow(scaler, optimizer)

    def _unscaled(
        self, _: Any, scaler: Any, optimizer: Any, *rest: Any, **__: Any
    ) -> None:
        del rest
        if scaler.is_enabled():
            self._marks.put(parameters_of(optimizer), "unscaled")

    def _check_stage(self, scaler: Any, optimizer: Any) -> None:
        """Note a step, or an unscale, that an update should have come before."""
        record = scaler._per_optimizer_states.get(id(optimizer))
        if record is not None and record["stage"] is OptState.STEPPED:
            own = self._of_scaler(scaler)
            own.updates_missing += 1
            own.step_at = place()

    def _before_step(self, scaler: Any, optimizer: Any, *_: Any, **__: Any) -> None:
        self._of_optimizer(optimizer)[1].step_at = place()
        if not scaler.is_enabled():
            return
        own = self._of_scaler(scaler)
        own.fresh, own.step_at = False, place()
        self._check_stage(scaler, optimizer)
        self._maybe_overflow(scaler, optimizer)

    def _maybe_overflow(self, scaler: Any, optimizer: Any) -> None:
        """Let one step be skipped, where a scheduler's manners have not shown yet."""
        own = self._of_optimizer(optimizer)[1]
        asked = any(s.optimizer is optimizer for s, _ in self._schedulers.values())
        if self._skips or not asked or own.steps + 1 != _FORCED:
            return
        record = scaler._per_optimizer_states.get(id(optimizer))
        if record is not None and record["found_inf_per_device"]:
            return  # checked already: an inf now would reach the weights
        for param in parameters_of(optimizer):
            grad = param.grad
            if type(grad) is torch.Tensor and not grad.is_sparse and grad.numel():
                grad.detach()[(0,) * grad.dim()] = math.inf
                return

    def _after_step(
        self, _: Any, scaler: Any, optimizer: Any, *__: Any, **___: Any
    ) -> None:
        own, clearing = self._of_optimizer(optimizer)[1:]
        own.skipped_last = False
        if scaler.is_enabled():
            facts = self._of_scaler(scaler)
            record = scaler._per_optimizer_states[id(optimizer)]
            flags = record["found_inf_per_device"].values()
            own.skipped_last = any(bool(flag.item()) for flag in flags)
            facts.steps += 1
            facts.skipped += own.skipped_last
            facts.skipped_row = facts.skipped_row + 1 if own.skipped_last else 0
            self._skips += own.skipped_last
            self._marks.put(parameters_of(optimizer), "unscaled")
        self._stepped(optimizer, own, clearing)

    def _before_update(self, scaler: Any, new_scale: Any = None) -> None:
        if not scaler.is_enabled():
            return
        own = self._of_scaler(scaler)
        if own.fresh and own.updates and new_scale is None:
            own.updates_doubled += 1
            own.update_at = place()

    def _after_update(self, _: Any, scaler: Any, new_scale: Any = None) -> None:
        del new_scale
        if scaler.is_enabled():
            own = self._of_scaler(scaler)
            own.updates += 1
            own.fresh = True
        self._maybe_end()

    # -- optimizers and schedulers ----------------------------------------------------

    def _optimizer_made(self, _: Any, optimizer: Any, *__: Any, **___: Any) -> None:
        self._of_optimizer(optimizer)

    def _of_optimizer(self, optimizer: Any) -> tuple[Any, OptimizerFacts, Clearing]:
        if id(optimizer) not in self._optimizers:
            facts = OptimizerFacts(type(optimizer).__name__)
            self.facts.optimizers.append(facts)
            self._optimizers[id(optimizer)] = (optimizer, facts, Clearing())
        return self._optimizers[id(optimizer)]

    def _before_own_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        del args, kwargs
        if self._within_scaler():
            return
        own = self._of_optimizer(optimizer)[1]
        own.step_at = place()
        if self._marks.any(parameters_of(optimizer), "scaled", "unscaled"):
            own.direct += 1
            own.direct_at = place()

    def _after_own_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        del args, kwargs
        if self._within_scaler():
            return
        own, clearing = self._of_optimizer(optimizer)[1:]
        own.skipped_last = False
        self._stepped(optimizer, own, clearing)
        if not any(scaler.updates for scaler in self.facts.scalers):
            self._maybe_end()

    def _within_scaler(self) -> bool:
        return "scaler steps" in self._patches.running

    def _stepped(self, optimizer: Any, own: OptimizerFacts, clearing: Clearing) -> None:
        own.steps += 1
        own.uncleared += clearing.stepped(optimizer)
        self.facts.steps = max(self.facts.steps, own.steps)
        for scheduler, facts in self._schedulers.values():
            if scheduler.optimizer is optimizer:
                facts.attempts += 1
                facts.skips += own.skipped_last

    def _maybe_end(self) -> None:
        if self._most is not None and self.facts.steps >= self._most:
            raise Enough

    def _scheduled(self, _: Any, scheduler: Any, *__: Any, **___: Any) -> None:
        if "make scheduler" in self._patches.running:
            return  # its own first step
        optimizer = getattr(scheduler, "optimizer", None)
        if optimizer is None:
            return
        if id(scheduler) not in self._schedulers:
            made = SchedulerFacts(type(scheduler).__name__)
            made.attempts = self._of_optimizer(optimizer)[1].steps
            self.facts.schedulers.append(made)
            self._schedulers[id(scheduler)] = (scheduler, made)
        own = self._schedulers[id(scheduler)][1]
        own.calls += 1
        if self._of_optimizer(optimizer)[1].skipped_last:
            own.after_skips += 1
            own.call_at = place()

    # -- gradients --------------------------------------------------------------------

    def _autocast(self, context: Any) -> None:
        if getattr(context, "_enabled", False):
            self.facts.autocast.add(str(context.fast_dtype).rpartition(".")[2])

    def _backward(self, tensors: Any, *_: Any, **__: Any) -> None:
        for entry in self._optimizers.values():
            entry[2].look()
        roots = tensors if isinstance(tensors, (list, tuple)) else [tensors]
        for root in roots:
            if isinstance(root, torch.Tensor) and root.grad_fn is not None:
                self._root(root)

    def _root(self, root: torch.Tensor) -> None:
        if self._known.pop(id(root.grad_fn), None) is not None:
            return
        reached, dtypes = holes.leaves(root)
        self._marks.reach(reached)
        if self._marks.any(reached, "scaled"):
            return  # a sum of losses that were scaled one by one
        self._marks.put(reached, "plain")
        self._loss(root)
        self._count(self.facts.plain_losses, dtypes)
        if torch.float16 in dtypes:
            self.facts.backward_at = place()

    def _computed(self, _: Any, tensors: Any, *__: Any, **___: Any) -> None:
        for entry in self._optimizers.values():
            entry[2].computed()
        node, reached = self._pending
        root = tensors[0] if isinstance(tensors, (list, tuple)) else tensors
        turn = sum(self.facts.scaled_losses.values())
        in_fp16 = "float16" in self.facts.scaled_losses
        if in_fp16 and node is root.grad_fn is not None and turn % _EVERY == 1:
            self._looks.take(reached, turn)
        self._pending = (None, [])

    def _clipped(self, parameters: Any) -> None:
        if {"scaler steps", "scaler clips"} & set(self._patches.running):
            return
        single = isinstance(parameters, torch.Tensor)
        if self._marks.any([parameters] if single else parameters, "scaled"):
            self.facts.clipped_scaled += 1
            self.facts.clipped_at = place()
