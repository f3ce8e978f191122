"""Skip or clip the steps whose gradient norm is an outlier, without a host read.

The rule is `SpikeGuard`, in the core.  This module applies it to the norm of every
step: a spike is skipped, or clipped to the limit.  The policy sees only whether the
gradients were finite: a spike says nothing about the scale.
"""

import weakref
from dataclasses import astuple
from math import isfinite
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from buoy._backends import torch as backend
from buoy._backends.torch.gradients import gather, multiply_
from buoy._core.errors import OptionError
from buoy._core.spikes import SpikeGuard, SpikeState
from buoy.torch import step
from buoy.torch.hooks import Extension, Scaler
from buoy.torch.optimizers import takes_scaler, takes_scaling
from buoy.torch.pending import Pending
from buoy.torch.scale import Scale

__all__ = ["Spikes"]

_CHECKS_ITSELF = (
    "`spike_guard` cannot skip or clip a step of {}: its `step` takes `grad_scaler` "
    "and checks the gradients itself. Nothing was applied. Remove `spike_guard`."
)


class Spikes(Extension):
    """One running distribution per optimizer, in the order in which they first step."""

    key = "spikes"

    def __init__(self, guard: SpikeGuard) -> None:
        self.guard = guard
        self._known: list[Any] = []
        self._states: list[SpikeState] = []

    # -- steps -------------------------------------------------------------------------

    @torch.no_grad()
    def before_step(self, scaler: Scaler, pending: Pending) -> None:
        """Judge the norm of gradients that the scaler did not clip."""
        optimizer = pending.optimizer
        if takes_scaling(optimizer) and takes_scaler(optimizer):
            raise OptionError(_CHECKS_ITSELF.format(type(optimizer).__name__))
        scale = scaler._placed("step")
        ready = pending.stage is OptState.READY and pending.factor is None
        if ready and scaler._is_overridden("_unscale_grads_"):
            scaler.unscale_(optimizer)
        if pending.stage is OptState.READY and pending.factor is None:
            step.measure_norm(scaler, scale, pending, 2.0)  # calls `norm_measured`
        elif pending.spike is None:
            self._judge_unscaled(scaler, scale, pending)

    def norm_measured(self, scaler: Scaler, pending: Pending) -> None:
        """Judge a norm while the gradients are still scaled."""
        if pending.norm is None or pending.factor is None:
            return
        factor = self._judge(scaler, pending, pending.norm)
        if self.guard.mode == "clip":
            pending.factor = pending.factor * factor
            pending.clipped_norm = pending.norm * factor

    def _judge_unscaled(self, scaler: Scaler, scale: Scale, pending: Pending) -> None:
        """Judge the norm of gradients that were unscaled by hand."""
        if pending.norm is None:  # it also agrees with the other ranks
            step.measure_norm(scaler, scale, pending, 2.0)
        step.agree(scaler, pending)
        if not pending.flags or pending.norm is None:
            return  # no rank has gradients
        factor = self._judge(scaler, pending, pending.norm)
        if self.guard.mode == "clip":
            multiply_(gather(pending.optimizer), factor)

    def _judge(
        self, scaler: Scaler, pending: Pending, norm: torch.Tensor
    ) -> torch.Tensor:
        """Note whether this is a spike; return the clip factor.  float32 []."""
        home = scaler._placed("step").device
        index = self._index(pending.optimizer)
        norm = backend.scalar(norm, home)
        held = astuple(self._states[index])
        state = SpikeState(*(backend.scalar(number, home) for number in held))
        judged = self.guard.look(state, torch.log2(norm), ops=backend.ops())
        self._states[index] = judged.state
        pending.spike = judged.spike.float()
        if self.guard.mode == "skip":
            pending.skip_where(pending.spike)
        return torch.where(judged.spike, torch.exp2(judged.limit) / norm, 1.0)

    def _index(self, optimizer: Any) -> int:
        for index, known in enumerate(self._known):
            if known() is optimizer:
                return index
        self._known.append(weakref.ref(optimizer))
        if len(self._known) > len(self._states):  # else its state was loaded
            self._states.append(self.guard.init())
        return len(self._known) - 1

    # -- state -------------------------------------------------------------------------

    def count(self) -> int:
        """Return the number of spikes of all optimizers.  Reads on the host."""
        return sum(int(state.spikes) for state in self._states)

    def state_dict(self) -> list[list[float]]:
        """Return the state of every distribution as plain numbers."""
        return [[float(number) for number in astuple(s)] for s in self._states]

    def load_state_dict(self, state: list[list[float]]) -> None:
        """Restore them; the optimizers must first step in the same order."""
        if not all(isfinite(number) for numbers in state for number in numbers):
            raise ValueError("its numbers must be finite")
        self._states = [SpikeState(*numbers) for numbers in state]
        self._known = []
