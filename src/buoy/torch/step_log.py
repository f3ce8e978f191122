"""The log of a scaler's steps, read by the watch, the recorder and the gates.

On a CPU, and after a host read, a step's row is available at once.  Otherwise its
numbers stay on the device and are copied to the host in batches, without waiting.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from buoy._backends import torch as backend
from buoy._backends.torch.names import Names
from buoy._backends.torch.reader import AsyncReader
from buoy._core.step import Row
from buoy._core.verdicts import HISTORY, Verdict, judge_losses
from buoy._core.watch import Watch
from buoy.torch.distributed import Agreement, late_error
from buoy.torch.hooks import Hooks
from buoy.torch.iteration import Iteration, Work
from buoy.torch.outcome import Context, LastStep
from buoy.torch.policy_runner import Evidence

if TYPE_CHECKING:
    from buoy.torch.gates import Gate

__all__ = ["Ended", "Entry", "StepLog"]

_BATCH = 16  # steps whose numbers are copied together
Number = float | torch.Tensor


class Ended(NamedTuple):
    """An iteration that `update` has ended."""

    works: list[Work]
    evidence: Evidence | None  # None: the scale was set by hand
    iteration: Iteration
    step: int
    scales: tuple[Number, Number]  # before and after
    home: torch.device


class Entry(NamedTuple):
    """What the host knows about a step before its numbers are copied."""

    step: int
    time: float
    measured: tuple[bool, ...]  # which of norm, amax, loss, spike are known
    outcome: LastStep | None  # None: inspected, but not stepped
    watched: bool  # the watch already has this step


class StepLog:
    """The steps of one scaler: the last outcomes, and rows for the recorder."""

    def __init__(
        self, names: Names, on_stuck: Any, patience: int, agreement: Agreement
    ) -> None:
        self.history: deque[Number] = deque(maxlen=HISTORY)  # losses of earlier steps
        self.context = Context(names, self.history, agreement)
        self.watch = Watch(on_stuck, patience, logger="buoy.torch")
        self.gates: list[Gate] = []
        self.last: LastStep | None = None
        self.compiled: Any = None  # the outcome of a compiled step; not read yet
        self.by_optimizer: dict[int, LastStep] = {}
        self.norms: dict[int, torch.Tensor] = {}  # of a disabled scaler's optimizers
        self.record: Callable[[Row, Entry], None] | None = None  # takes every row
        self._late = AsyncReader(every=min(patience, _BATCH))

    def add(
        self,
        work: Work,
        found: torch.Tensor | None,
        scale: Number,
        losses: Sequence[Number],
    ) -> LastStep:
        """Log the outcome of an optimizer's step."""
        outcome = LastStep(self.context, work, found, scale, losses)
        work.outcome, self.last, self.compiled = outcome, outcome, None
        key = id(work.optimizer)
        self.by_optimizer[key] = outcome
        if work.finite is not False:
            self.context.examined.discard(key)
        return outcome

    def add_unscaled(self, optimizer: Any) -> None:
        """Log a step of a disabled scaler: always applied."""
        work = Work()
        work.optimizer, work.norm = optimizer, self.norms.pop(id(optimizer), None)
        outcome = self.add(work, None, 1.0, ())
        outcome._applied, outcome._next = True, 1.0
        if outcome._first is not None:  # measurable if written by backward only
            outcome._first = outcome._first[0], 0

    def end(self, ended: Ended, hooks: Hooks) -> None:
        """Log an iteration, and report it to the features and the gates."""
        try:
            self._conclude(ended)
        finally:
            try:
                for hook in hooks.concluded:
                    hook(ended.works)
            finally:
                if self.gates and "groups" not in hooks.by_key:  # its update opens them
                    self.open_gates([one.outcome for one in ended.works if one.outcome])

    def _conclude(self, ended: Ended) -> None:
        """Log an iteration; may warn or raise, as `on_stuck` says."""
        losses, evidence, stepped = ended.iteration.losses, ended.evidence, []
        finite = None if evidence is None else evidence.finite
        for work in ended.works:
            if (outcome := work.outcome) is not None:
                stepped.append(outcome)
                outcome._next = ended.scales[1]
                if finite and outcome._applied is False:
                    finite = False  # skipped for a reason other than overflow
        try:
            if finite is not None:
                self._note(ended, stepped, finite=finite)
            if (finite is None and evidence is not None) or (self.record and stepped):
                self._write(ended, stepped)
        finally:
            if losses and finite and len(losses) == 1:
                self.history.append(losses[0])
            elif losses and finite is not False:
                self.history.append(_largest_loss(ended))

    def _note(self, ended: Ended, steps: list[LastStep], *, finite: bool) -> None:
        """Pass a step whose outcome is known to the watch."""
        before, after = ended.scales
        bad = None if finite else next((x for x in steps if x._applied is False), None)
        if finite or (bad is None and steps):
            one = ended.works[0] if len(ended.works) == 1 else None
            norm, amax = (one.norm, one.amax) if one else _sizes(ended)
            if amax is not None and self.context.agreement.active:
                known = all("amax_log2" in work.measured for work in ended.works)
                amax = amax if known else None  # that of one rank alone
            scale: Any = after
            if not isinstance(after, float):
                scale = partial(backend.read_one, after)
            size = None if norm is not None or amax is None else backend.known(amax)
            if size and isinstance(before, float):
                size /= before
            norm = None if norm is None else backend.known(norm)
            self.watch.applied(scale, norm=norm, amax=size)
        elif bad is not None:
            self.watch.skipped(backend.read_one(after), bad.verdict, bad.offenders)
        else:  # checked and non-finite, but the user did not call `step`
            history = backend.read(list(self.history))
            losses = backend.read(list(ended.iteration.losses))
            self.watch.skipped(backend.read_one(after), judge_losses(losses, history))

    def _write(self, ended: Ended, stepped: list[LastStep]) -> None:
        """Make a step's row now, or start copying its numbers to the host."""
        bad = [one for one in stepped if one._applied is False]
        outcome = bad[0] if bad else stepped[-1] if stepped else None
        known = bool(stepped) and all(one._applied is not None for one in stepped)
        flag: Number | None = float(bool(bad))
        if not known and outcome is not None:
            flag = outcome.found
        if not known and ended.evidence and (not outcome or outcome._spike is None):
            flag = ended.evidence.found  # without vetoes of the spike guard
        losses, iteration = ended.iteration.losses, ended.iteration
        loss = losses[-1] if losses else None
        if len(losses) > 1 and not known:  # NaN if any of them is not finite
            each = torch.stack([backend.scalar(one, ended.home) for one in losses])
            loss = each[-1] + (each * 0.0).sum()
        measured = (*_sizes(ended), loss, outcome._spike if outcome else None)
        numbers = [flag, iteration.differs, *ended.scales, *measured]
        iteration.differs = None
        has = tuple(number is not None for number in measured)
        entry = Entry(ended.step, time.time(), has, outcome, known)
        values = [value for x in numbers if (value := backend.known(x)) is not None]
        if len(values) == len(numbers):
            self._add_row(values, entry)
            return
        tensors = [backend.scalar(0.0 if x is None else x, ended.home) for x in numbers]
        self._late.post(torch.stack(tensors), entry)
        self.collect()

    def collect(self, *, wait: bool = False) -> None:
        """Process the rows that were copied; with `wait`, wait for all of them."""
        for values, entry in self._late.drain() if wait else self._late.collect():
            self._add_row(values, entry)

    def _add_row(self, values: list[float], entry: Entry) -> None:
        flag, differs, scale, after, *rest = values
        if differs:
            raise late_error(scale)
        norm, amax, loss, spike = (
            x if known else None for x, known in zip(rest, entry.measured, strict=True)
        )
        outcome, applied = entry.outcome, not flag > 0
        offenders: tuple[str, ...] = ()
        if applied or spike:
            verdict = Verdict.APPLIED if applied else Verdict.SPIKE
        elif entry.watched and outcome is not None and outcome._applied is False:
            verdict, offenders = outcome.verdict, outcome.offenders
        else:
            finite = loss is None or isfinite(loss)
            verdict = Verdict.SCALE_TOO_HIGH if finite else Verdict.FORWARD_NONFINITE
        row = Row(
            step=entry.step,
            scale=scale,
            next_scale=after,
            applied=applied,
            verdict=verdict,
            norm=norm,
            amax=None if amax is None else amax / scale,
            loss=loss,
            offenders=offenders,
        )
        if self.record is not None:
            self.record(row, entry)
        if not entry.watched:
            self.watch.note(row, partial(_examine_last, self.last, verdict))

    def open_gates(self, stepped: list[LastStep] | None) -> None:
        """Advance the gated objects whose optimizers stepped; None: all of them.

        If one raises, the others still advance.
        """
        with ExitStack() as due:
            for gate in reversed(self.gates):
                if stepped is None or self._is_due(gate, stepped):
                    due.callback(gate.advance)

    def _is_due(self, gate: "Gate", stepped: list[LastStep]) -> bool:
        if gate.optimizer is not None:
            stepped = [one for one in stepped if gate.follows(one.optimizer)]
            known = (one.optimizer for one in self.by_optimizer.values())
            gate.warn_if_closed(stepped=bool(stepped), others=known)
        return bool(stepped) and (gate.attempted or all(x.applied for x in stepped))


def _examine_last(
    last: LastStep | None, verdict: Verdict
) -> tuple[Verdict, tuple[str, ...]]:
    """Return verdict and offenders of the last step, if it was skipped as well."""
    if verdict is Verdict.FORWARD_NONFINITE or last is None or last.applied:
        return verdict, ()
    return last.verdict, last.offenders


def _largest_loss(ended: Ended) -> Number:
    """Return the largest loss of an iteration; NaN if its step was skipped."""
    losses, evidence = ended.iteration.losses, ended.evidence
    loss = losses[-1]
    if len(losses) > 1:
        sizes = [backend.scalar(each, ended.home).abs() for each in losses]
        loss = torch.stack(sizes).max()
    if evidence is None or evidence.finite is not None:
        return loss
    skipped = evidence.found.reshape(()) > 0
    return backend.scalar(loss, skipped.device).masked_fill(skipped, torch.nan)


def _sizes(ended: Ended) -> tuple[Number | None, Number | None]:
    """Combine several optimizers' norms (unscaled) and largest gradients (scaled).

    Unless each has one, and norms of one order, the result is unknown.
    """
    works = ended.works
    if len(works) == 1:
        return works[0].norm, works[0].amax
    norms = [work.norm for work in works if work.norm is not None]
    sizes = [backend.scalar(x.amax, ended.home) for x in works if x.amax is not None]
    n = len(works) or None
    alike = len(norms) == n and len({work.order for work in works}) == 1
    order = works[0].order if alike else 2.0
    norm = torch.linalg.vector_norm(torch.stack(norms), order) if alike else None
    amax = torch.stack(sizes).max() if len(sizes) == n else None
    return norm, amax
