"""What optimizers and schedulers did."""

from dataclasses import dataclass, field

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from buoy._backends.torch.gradients import parameters_of
from buoy.diagnose.doctor.facts import Facts, OptimizerFacts, SchedulerFacts
from buoy.diagnose.doctor.gradients import Clearing
from buoy.diagnose.doctor.patches import place

__all__ = ["Steps"]


@dataclass(slots=True)
class _KnownOptimizer:
    optimizer: Optimizer  # held, so that its id stays its own
    facts: OptimizerFacts
    clearing: Clearing = field(default_factory=Clearing)


@dataclass(slots=True)
class _KnownScheduler:
    scheduler: LRScheduler
    facts: SchedulerFacts


class Steps:
    """Counts steps, applied or not, and what was done between them."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        # By id: neither has to be hashable.
        self._optimizers: dict[int, _KnownOptimizer] = {}
        self._schedulers: dict[int, _KnownScheduler] = {}

    def of(self, optimizer: Optimizer) -> OptimizerFacts:
        """Return the facts about an optimizer, which may be a new one."""
        return self._known(optimizer).facts

    def _known(self, optimizer: Optimizer) -> _KnownOptimizer:
        if id(optimizer) not in self._optimizers:
            facts = OptimizerFacts(type(optimizer).__name__)
            self._facts.optimizers.append(facts)
            self._optimizers[id(optimizer)] = _KnownOptimizer(optimizer, facts)
        return self._optimizers[id(optimizer)]

    def stepped(self, optimizer: Optimizer, *, skipped: bool) -> None:
        """Note that a step was taken, or tried."""
        known = self._known(optimizer)
        known.facts.steps += 1
        known.facts.skipped_last = skipped
        known.facts.uncleared += known.clearing.stepped(optimizer)
        self._facts.steps = max(self._facts.steps, known.facts.steps)
        for other in self._schedulers.values():
            if other.scheduler.optimizer is optimizer:
                other.facts.attempts += 1
                other.facts.skips += skipped

    def scheduled(self, scheduler: LRScheduler) -> None:
        """Note that a scheduler was advanced."""
        optimizer: Optimizer | None = getattr(scheduler, "optimizer", None)
        if optimizer is None:
            return
        if id(scheduler) not in self._schedulers:
            facts = SchedulerFacts(type(scheduler).__name__)
            facts.attempts = self.of(optimizer).steps
            self._facts.schedulers.append(facts)
            self._schedulers[id(scheduler)] = _KnownScheduler(scheduler, facts)
        facts = self._schedulers[id(scheduler)].facts
        facts.calls += 1
        if self.of(optimizer).skipped_last:
            facts.after_skips += 1
            facts.call_at = place()

    def has_scheduler(self, optimizer: Optimizer) -> bool:
        """Return whether a scheduler of this optimizer was seen."""
        known = self._schedulers.values()
        return any(other.scheduler.optimizer is optimizer for other in known)

    def before_backward(self) -> None:
        """See which gradients were cleared."""
        for known in self._optimizers.values():
            known.clearing.look()

    def after_backward(self) -> None:
        """Take what the pass has left for what is there."""
        for known in self._optimizers.values():
            known.clearing.computed()

    def held(self) -> set[int]:
        """Return the ids of the parameters that an optimizer holds."""
        return {
            id(param)
            for known in self._optimizers.values()
            for param in parameters_of(known.optimizer)
        }
