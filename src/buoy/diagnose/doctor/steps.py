"""What optimizers and schedulers did."""

from dataclasses import dataclass, field
from typing import Any

from buoy._backends.torch.gradients import parameters_of
from buoy.diagnose.doctor.facts import Facts, OptimizerFacts, SchedulerFacts
from buoy.diagnose.doctor.gradients import Clearing
from buoy.diagnose.doctor.patches import place

__all__ = ["Steps"]


@dataclass
class _Known:
    optimizer: Any
    facts: OptimizerFacts
    clearing: Clearing = field(default_factory=Clearing)


class Steps:
    """Counts steps, applied or not, and what was done between them."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._optimizers: dict[int, _Known] = {}
        self._schedulers: dict[int, tuple[Any, SchedulerFacts]] = {}

    def of(self, optimizer: Any) -> OptimizerFacts:
        """Give what is known of an optimizer, meeting it if need be."""
        return self._known(optimizer).facts

    def _known(self, optimizer: Any) -> _Known:
        if id(optimizer) not in self._optimizers:
            facts = OptimizerFacts(type(optimizer).__name__)
            self._facts.optimizers.append(facts)
            self._optimizers[id(optimizer)] = _Known(optimizer, facts)
        return self._optimizers[id(optimizer)]

    def stepped(self, optimizer: Any, *, skipped: bool) -> None:
        """Note that a step was taken, or tried."""
        known = self._known(optimizer)
        known.facts.steps += 1
        known.facts.skipped_last = skipped
        known.facts.uncleared += known.clearing.stepped(optimizer)
        self._facts.steps = max(self._facts.steps, known.facts.steps)
        for scheduler, facts in self._schedulers.values():
            if scheduler.optimizer is optimizer:
                facts.attempts += 1
                facts.skips += skipped

    def scheduled(self, scheduler: Any) -> None:
        """Note that a scheduler was advanced."""
        optimizer = getattr(scheduler, "optimizer", None)
        if optimizer is None:
            return
        if id(scheduler) not in self._schedulers:
            made = SchedulerFacts(type(scheduler).__name__)
            made.attempts = self.of(optimizer).steps
            self._facts.schedulers.append(made)
            self._schedulers[id(scheduler)] = (scheduler, made)
        own = self._schedulers[id(scheduler)][1]
        own.calls += 1
        if self.of(optimizer).skipped_last:
            own.after_skips += 1
            own.call_at = place()

    def has_scheduler(self, optimizer: Any) -> bool:
        """Say whether a scheduler of this optimizer was seen."""
        return any(s.optimizer is optimizer for s, _ in self._schedulers.values())

    def before_backward(self) -> None:
        """See which gradients were cleared."""
        for known in self._optimizers.values():
            known.clearing.look()

    def after_backward(self) -> None:
        """Take what the pass has left for what is there."""
        for known in self._optimizers.values():
            known.clearing.computed()

    def held(self) -> set[int]:
        """Tell which parameters some optimizer holds, by their ids."""
        return {
            id(param)
            for known in self._optimizers.values()
            for param in parameters_of(known.optimizer)
        }
