"""The log of a scaler's steps, read by the watch, the recorder and the gates.

On a CPU, and after a host read, a step's row is available at once.  Otherwise its
numbers stay on the device and are copied to the host in batches, without waiting.
"""

import time
import weakref
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
from buoy._core.watch import OnStuck, Watch
from buoy.torch.distributed import late_error
from buoy.torch.outcome import Clues, LastStep, weak_reference
from buoy.torch.pending import Pending
from buoy.torch.scale import Evidence, Number

if TYPE_CHECKING:
    from buoy.torch.gates import Gate
    from buoy.trace import Recorder

__all__ = ["Ended", "Entry", "StepLog"]

_BATCH = 16  # steps whose numbers are copied together


class Ended(NamedTuple):
    """An iteration that `update` has ended."""

    pendings: list[Pending]
    stepped: list[LastStep]  # the outcomes of those that have stepped or were skipped
    evidence: Evidence | None  # None: the scale was set by hand
    losses: Sequence[Number]
    step: int
    scale: Number
    next_scale: Number
    home: torch.device


class Entry(NamedTuple):
    """What the host knows about a step before its numbers are copied."""

    step: int
    time: float
    measured: tuple[str, ...]  # which of norm, amax, loss, spike are in the copy
    outcome: LastStep | None  # None: inspected, but not stepped
    watched: bool  # the watch already has this step


class StepLog:
    """The steps of one scaler: the last outcomes, and rows for the recorder."""

    def __init__(self, names: Names, on_stuck: OnStuck, patience: int) -> None:
        self._names = names
        self.history: deque[Number] = deque(maxlen=HISTORY)  # losses of earlier steps
        self.watch = Watch(on_stuck, patience, logger="buoy.torch")
        self.gates: list[Gate] = []
        self.last: LastStep | None = None
        self.compiled: Any = None  # the outcome of a compiled step; not read yet
        self.by_optimizer: dict[int, LastStep] = {}
        self.norms: dict[int, torch.Tensor] = {}  # of a disabled scaler's optimizers
        self.recorder: Recorder | None = None
        self.record: Callable[[Row, Entry], None] | None = None  # takes every row
        self._late = AsyncReader(every=min(patience, _BATCH))

    # -- a step ------------------------------------------------------------------------

    def add(
        self,
        pending: Pending,
        found: torch.Tensor | None,
        scale: Number,
        losses: Sequence[Number],
        verdict: Verdict | None = None,
        *,
        step: int,
    ) -> LastStep:
        """Log the outcome of an optimizer's step; return its record."""
        outcome = LastStep(
            self._clues(pending, losses),
            step=step,
            found=found,
            applied=False if found is None else pending.applied,
            scale=scale,
            norm=pending.norm,
            verdict=verdict,
        )
        return self.keep(pending.optimizer, outcome)

    def _clues(self, pending: Pending, losses: Sequence[Number]) -> Clues:
        """Keep what the reason for a skip is found from."""
        optimizer = weak_reference(pending.optimizer)
        if pending.first is None:
            pending.note_first()
        if pending.applied:
            return Clues(
                optimizer, self._names, first=pending.first, spike=pending.spike
            )
        norms: Sequence[torch.Tensor] = ()
        params: list[torch.Tensor] = []
        if pending.survey is not None and pending.gathered is not None:
            norms = pending.survey.parts
            params = pending.gathered.params if len(norms) else []
        return Clues(
            optimizer,
            self._names,
            losses=tuple(losses),
            history=tuple(self.history),
            params=tuple(map(weakref.ref, params)),
            norms=norms,
            first=pending.first,
            spike=pending.spike,
        )

    def add_unscaled(self, optimizer: Any) -> None:
        """Log a step of a disabled scaler: always applied."""
        before = self.by_optimizer.get(id(optimizer))
        outcome = LastStep(
            Clues(weak_reference(optimizer), self._names),
            step=0 if before is None else before.step + 1,
            found=None,
            applied=True,
            scale=1.0,
            norm=self.norms.pop(id(optimizer), None),
            next_scale=1.0,
        )
        self.keep(optimizer, outcome)

    def keep(self, optimizer: Any, outcome: LastStep) -> LastStep:
        """Make this the last step, of all and of its optimizer."""
        self.compiled = None
        self.last = outcome
        self.by_optimizer[id(optimizer)] = outcome
        return outcome

    # -- an iteration ------------------------------------------------------------------

    def end(self, ended: Ended) -> None:
        """Complete the records of an iteration; tell the watch and the recorder.

        May warn or raise, as `on_stuck` says.
        """
        for outcome in ended.stepped:
            outcome.complete(ended.next_scale)
        finite = None if ended.evidence is None else ended.evidence.finite
        if finite and any(one.applied_if_known is False for one in ended.stepped):
            finite = False  # skipped for a reason other than overflow
        try:
            if finite is not None:
                self._tell_watch(ended, finite=finite)
            late = finite is None and ended.evidence is not None
            if late or (self.record and ended.stepped):
                self._write(ended)
        finally:
            if ended.losses and finite is not False:
                self.history.append(_largest_loss(ended))

    def _tell_watch(self, ended: Ended, *, finite: bool) -> None:
        """Pass a step whose outcome is known to the watch."""
        after = ended.next_scale
        skipped = [one for one in ended.stepped if one.applied_if_known is False]
        bad = skipped[0] if skipped and not finite else None
        if finite or (bad is None and ended.stepped):
            self._tell_applied(ended)
        elif bad is not None:
            self.watch.skipped(backend.read_one(after), bad.verdict, bad.offenders)
        else:  # checked and non-finite, but the user did not call `step`
            losses = backend.read(ended.losses)
            verdict = judge_losses(losses, backend.read(list(self.history)))
            self.watch.skipped(backend.read_one(after), verdict)

    def _tell_applied(self, ended: Ended) -> None:
        norm, amax = _sizes(ended)
        size = None
        if norm is None and amax is not None:
            size = backend.known(amax)
        if size and isinstance(ended.scale, float):
            size /= ended.scale
        scale: float | Callable[[], float]
        if isinstance(ended.next_scale, float):
            scale = ended.next_scale
        else:
            scale = partial(backend.read_one, ended.next_scale)  # read for a message
        norm_if_known = None if norm is None else backend.known(norm)
        self.watch.applied(scale, norm=norm_if_known, amax=size)

    def _write(self, ended: Ended) -> None:
        """Make a step's row now, or start copying its numbers to the host."""
        stepped = ended.stepped
        bad = [one for one in stepped if one.applied_if_known is False]
        outcome = next(iter([*bad, *reversed(stepped)]), None)
        outcomes = [one.applied_if_known for one in stepped]
        known = bool(stepped) and None not in outcomes
        norm, amax = _sizes(ended)
        differs = [one.differs for one in ended.pendings if one.differs is not None]
        numbers: dict[str, Number | None] = {
            "skipped": float(bool(bad)) if known else _flag(ended, outcome),
            "differs": differs[-1] if differs else 0.0,
            "scale": ended.scale,
            "next_scale": ended.next_scale,
            "norm": norm,
            "amax": amax,
            "loss": _last_loss(ended, known=known),
            "spike": None if outcome is None else outcome.clues.spike,
        }
        measured = {name: x for name, x in numbers.items() if x is not None}
        entry = Entry(ended.step, time.time(), tuple(measured), outcome, known)
        values = [backend.known(x) for x in measured.values()]
        if None not in values:
            self._add_row([x for x in values if x is not None], entry)
            return
        tensors = [backend.scalar(x, ended.home) for x in measured.values()]
        self._late.post(torch.stack(tensors), entry)
        self.collect()

    def collect(self, *, wait: bool = False) -> None:
        """Process the rows that were copied; with `wait`, wait for all of them."""
        for values, entry in self._late.drain() if wait else self._late.collect():
            self._add_row(values, entry)

    def _add_row(self, values: Sequence[float], entry: Entry) -> None:
        found = dict(zip(entry.measured, values, strict=True))
        scale = found["scale"]
        if found["differs"]:
            raise late_error(scale)
        loss = found.get("loss")
        amax = found.get("amax")
        applied = not found["skipped"] > 0
        verdict, offenders = _verdict(entry, applied, found.get("spike"), loss)
        row = Row(
            step=entry.step,
            scale=scale,
            next_scale=found["next_scale"],
            applied=applied,
            verdict=verdict,
            norm=found.get("norm"),
            amax=None if amax is None else amax / scale,
            loss=loss,
            offenders=offenders,
        )
        if self.record is not None:
            self.record(row, entry)
        if not entry.watched:
            self.watch.note(row, partial(_examine_last, self.last, verdict))

    # -- gates -------------------------------------------------------------------------

    def open_gates(self, stepped: Sequence[LastStep] | None) -> None:
        """Advance the gated objects whose optimizers stepped; None: all of them.

        If one raises, the others still advance.
        """
        if not self.gates:
            return
        with ExitStack() as due:
            for gate in reversed(self.gates):
                if stepped is None or self._is_due(gate, stepped):
                    due.callback(gate.advance)

    def _is_due(self, gate: "Gate", stepped: Sequence[LastStep]) -> bool:
        if gate.optimizer is not None:
            stepped = [one for one in stepped if gate.follows(one.optimizer)]
            known = (one.optimizer for one in self.by_optimizer.values())
            gate.warn_if_closed(stepped=bool(stepped), others=known)
        return bool(stepped) and (gate.attempted or all(x.applied for x in stepped))


def _flag(ended: Ended, outcome: LastStep | None) -> Number | None:
    """Return whether a step was skipped, as the device has it."""
    # Not the outcome's own flag, if the spike guard has added to it.
    if ended.evidence is not None and (outcome is None or outcome.clues.spike is None):
        return ended.evidence.found
    return None if outcome is None else outcome.found


def _verdict(
    entry: Entry, applied: bool, spike: float | None, loss: float | None
) -> tuple[Verdict, tuple[str, ...]]:
    """Return the reason for a step's outcome, and the offenders, without reading."""
    if applied:
        return Verdict.APPLIED, ()
    if spike:
        return Verdict.SPIKE, ()
    outcome = entry.outcome
    if entry.watched and outcome is not None and outcome.applied_if_known is False:
        return outcome.verdict, outcome.offenders
    if loss is None or isfinite(loss):
        return Verdict.SCALE_TOO_HIGH, ()
    return Verdict.FORWARD_NONFINITE, ()


def _examine_last(
    last: LastStep | None, verdict: Verdict
) -> tuple[Verdict, tuple[str, ...]]:
    """Return verdict and offenders of the last step, if it was skipped as well."""
    if verdict is Verdict.FORWARD_NONFINITE or last is None or last.applied:
        return verdict, ()
    return last.verdict, last.offenders


def _last_loss(ended: Ended, *, known: bool) -> Number | None:
    """Return the last loss; if the outcome is not known, NaN if any is not finite."""
    if len(ended.losses) <= 1 or known:
        return ended.losses[-1] if ended.losses else None
    each = torch.stack([backend.scalar(one, ended.home) for one in ended.losses])
    return each[-1] + (each * 0.0).sum()


def _largest_loss(ended: Ended) -> Number:
    """Return the largest loss of an iteration; NaN if its step was skipped."""
    loss = ended.losses[-1]
    if len(ended.losses) > 1:
        sizes = [backend.scalar(each, ended.home).abs() for each in ended.losses]
        loss = torch.stack(sizes).max()
    if ended.evidence is None or ended.evidence.finite is not None:
        return loss
    skipped = ended.evidence.found.reshape(()) > 0
    return backend.scalar(loss, skipped.device).masked_fill(skipped, torch.nan)


def _sizes(ended: Ended) -> tuple[Number | None, Number | None]:
    """Combine several optimizers' norms (unscaled) and largest gradients (scaled).

    None where one of them has none, and for norms of different orders.
    """
    pendings = ended.pendings
    if len(pendings) == 1:
        return pendings[0].norm, pendings[0].amax
    norms = [one.norm for one in pendings if one.norm is not None]
    sizes = [one.amax for one in pendings if one.amax is not None]
    orders = {one.order for one in pendings}
    norm: Number | None = None
    if norms and len(norms) == len(pendings) and len(orders) == 1:
        norm = torch.linalg.vector_norm(torch.stack(norms), orders.pop())
    amax: Number | None = None
    if sizes and len(sizes) == len(pendings):
        amax = torch.stack([backend.scalar(x, ended.home) for x in sizes]).max()
    return norm, amax
