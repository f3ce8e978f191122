"""Skip or clip the steps whose gradient norm is an outlier, without asking the device.

The rule is `SpikeGuard`, in the core.  Here it meets the survey: where a guard is set
every step takes the norm, and a spike enters the flag for not stepping, or the
multiplier.  What the policy learns is the finite check alone: a spike says nothing
about the scale.
"""

import weakref
from dataclasses import astuple
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from buoy._backends import torch as backend
from buoy._core.spikes import SpikeGuard, SpikeState
from buoy.torch import apply, replicas, survey
from buoy.torch.clip import Clipping
from buoy.torch.errors import OptionError
from buoy.torch.gather import Gathered, gather
from buoy.torch.step import LastStep
from buoy.torch.takers import hands_over

__all__ = ["Spikes", "Spiking", "spike_guard"]


def spike_guard(given: str | SpikeGuard | None) -> SpikeGuard | None:
    """Read the `spike_guard` option."""
    if given is None or isinstance(given, SpikeGuard):
        return given
    if given == "skip":
        return SpikeGuard()
    if given == "clip":
        return SpikeGuard(mode="clip")
    message = (
        "`spike_guard` must be None (off), 'skip', 'clip' or a buoy.torch.SpikeGuard, "
        f"got {given!r}. It takes no number: thresholds are fields of SpikeGuard."
    )
    raise OptionError(message)


class Spikes:
    """One running distribution per optimizer, in the order in which they first step."""

    def __init__(self, guard: SpikeGuard) -> None:
        self.guard = guard
        self._known: list[Any] = []
        self._states: list[SpikeState] = []

    def __reduce__(self) -> Any:
        return _spikes, (self.guard, self.saved())

    def look(self, optimizer: Any, norm: torch.Tensor) -> tuple[Any, Any]:
        """Give the flag of a spike and the coefficient that clips it.  float32 []."""
        index = self._index(optimizer)
        if index == len(self._states):
            self._states.append(self.guard.init())
        state = SpikeState(
            *(
                torch.as_tensor(number, dtype=torch.float32, device=norm.device)
                for number in astuple(self._states[index])
            )
        )
        seen = self.guard.look(state, torch.log2(norm.float()), ops=backend.ops())
        self._states[index] = seen.state
        allowed = torch.exp2(seen.limit) / norm
        return seen.spike.float(), torch.where(seen.spike, allowed, 1.0)

    def _index(self, optimizer: Any) -> int:
        for index, known in enumerate(self._known):
            if known() is optimizer:
                return index
        self._known.append(weakref.ref(optimizer))
        return len(self._known) - 1

    def count(self) -> int:
        """Count the spikes of all optimizers.  Reads on the host."""
        return sum(int(state.spikes) for state in self._states)

    def saved(self) -> list[list[float]]:
        """Write every distribution as plain numbers."""
        return [[float(number) for number in astuple(s)] for s in self._states]

    def load(self, saved: list[list[float]]) -> None:
        """Go on from there; optimizers are met again in the same order."""
        self._known = []
        self._states = [SpikeState(*numbers) for numbers in saved]


def _spikes(guard: SpikeGuard, saved: list[list[float]]) -> Spikes:
    made = Spikes(guard)
    made.load(saved)
    return made


class Spiking(Clipping):
    """Look at every norm, where a guard is set."""

    _spikes: Spikes | None

    @property
    def spikes(self) -> int:
        """How many steps the spike guard has skipped or clipped."""
        return 0 if self._spikes is None else self._spikes.count()

    def _prepare(self, optimizer: Any, record: dict[str, Any]) -> None:
        """Survey before the step, where more than finiteness decides about it."""
        if record["stage"] is OptState.READY and "multiplier" not in record:
            if self._spikes is not None:
                with torch.no_grad():
                    self._survey_norm(optimizer, record, 2.0)
            elif hands_over(optimizer):
                self._check_grads(optimizer)
                record["surveyed"] = True
            else:
                self.unscale_(optimizer)
        elif self._spikes is not None and "spike" not in record:
            self._look_unscaled(optimizer, record)

    def _survey_norm(
        self, optimizer: Any, record: dict[str, Any], order: float
    ) -> None:
        super()._survey_norm(optimizer, record, order)
        if self._spikes is not None and "norm" in record:
            coefficient = self._take(optimizer, record)
            if self._spikes.guard.mode == "clip":
                record["multiplier"] = record["multiplier"] * coefficient
                record["clipped_norm"] = record["norm"] * coefficient

    @torch.no_grad()
    def _look_unscaled(self, optimizer: Any, record: dict[str, Any]) -> None:
        """Do the same for gradients that were unscaled by hand."""
        gathered = gather(optimizer)
        if self._spikes is None or not (gathered.grads or self._ranks.groups()):
            return
        self._settle(record)
        if not record["found_inf_per_device"]:
            return  # nobody has gradients
        if "norm" not in record:
            record["norm"] = self._unscaled_norm(optimizer, record, gathered)
        coefficient = self._take(optimizer, record)
        if self._spikes.guard.mode == "clip":
            for device, _, grads in gathered.buckets:
                backend.multiply_(grads, coefficient.to(device, non_blocking=True))

    def _unscaled_norm(
        self, optimizer: Any, record: dict[str, Any], gathered: Gathered
    ) -> torch.Tensor | None:
        one = torch.ones((), dtype=torch.float32, device=self._home())
        seen = survey.measure(gathered, 2.0, one)
        if self._ranks.groups():
            return replicas.global_norm(self, optimizer, record, gathered, seen, 2.0)
        return seen.norm

    def _take(self, optimizer: Any, record: dict[str, Any]) -> torch.Tensor:
        """Note a spike; keep what the policy may learn apart from it."""
        spikes: Any = self._spikes
        self._settle(record)
        spike, coefficient = spikes.look(optimizer, record["norm"])
        record["spike"] = spike
        if spikes.guard.mode == "skip":
            apply.add_cause(record, spike, self._home())
        clean: torch.Tensor = coefficient
        return clean

    def _report(
        self, optimizer: Any, record: dict[str, Any], scale: float | torch.Tensor
    ) -> LastStep:
        report = super()._report(optimizer, record, scale)
        if "spike" in record:
            report._spike = record["spike"]
        return report
