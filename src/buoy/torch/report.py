"""The part of a scaler that says what it did."""

from collections import deque
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch

from buoy._backends import torch as backend
from buoy._core.policies.policy import Policy
from buoy._core.policies.static import NoScaling
from buoy._core.state import Verdict
from buoy._core.verdicts import judge_losses
from buoy.torch import apply, survey, traced, verdicts, words_ranks
from buoy.torch.contract import Contract
from buoy.torch.fingerprint import first_of, still_there
from buoy.torch.gates import NEVER_STEPS, AdvanceOn, Gate, make_gates
from buoy.torch.gather import gather
from buoy.torch.listen import Listener
from buoy.torch.mailbox import Mailbox
from buoy.torch.rule import Evidence
from buoy.torch.step import LastStep

if TYPE_CHECKING:
    import os

    from buoy.trace import Recorder

__all__ = ["Reporting"]


class Reporting(Contract):
    """Keep the last step, its verdict, its culprits, and the gates that follow it."""

    _last: LastStep | None
    _gates: list[Gate]
    _history: deque[float | torch.Tensor]
    _frozen: tuple[int, torch.Tensor] | None
    _reports: dict[int, LastStep]
    _mail: Mailbox
    _noted: traced.Look | tuple[()]
    _traced: traced.Outcome | tuple[()]
    _traced_loss: torch.Tensor | None
    _untold: traced.Outcome | None  # of a compiled step that nobody asked about yet
    _recorder: "Recorder | None"

    @property
    def last_step(self) -> LastStep | None:
        """What became of the last step; None before the first."""
        if self._untold is not None:
            self._report_traced(self._untold)
        return self._last

    @property
    def policy(self) -> Policy:
        """The rule that moves the scale, for reading and for replay."""
        return self._rule.policy(self) if self._enabled else NoScaling()

    @property
    def trace(self) -> "Recorder | None":
        """What records this run: None if nothing does, or if another rank does."""
        return self._recorder

    def _record(self, trace: "str | os.PathLike[str] | Recorder") -> None:
        # Imported here: who does not record need not load SQLite.
        from buoy.torch.record import record  # noqa: PLC0415

        self._recorder = record(self, trace)

    def listen(self, listener: Listener) -> None:
        """Let a listener look at every step's gradients and hear what became of it.

        Its `look` comes before they are unscaled, its `concluded` at `update`; while
        nobody listens this costs nothing.
        """
        self._listeners.append(listener)

    def last_step_of(self, optimizer: Any) -> LastStep | None:
        """Tell what became of this optimizer's last step."""
        report = self._reports.get(id(optimizer))
        return report if report and report._optimizer() is optimizer else None

    def gate(
        self,
        *things: Any,
        optimizer: Any = None,
        advance_on: AdvanceOn = "applied",
    ) -> None:
        """Let `update` advance schedulers, averages and counters.

        Each has a `step()` or an `update()`, or is called; only after steps that were
        applied, or after all with `advance_on="attempted"`.  One that belongs to an
        optimizer follows that one, others follow all that stepped.  With an optimizer
        that takes `found_inf` this asks the device once per update.

        Example:
            >>> import buoy.torch
            >>> scaler = buoy.torch.GradScaler("cpu")
            >>> scaler.gate(lambda: print("moved"))
        """
        self._gates += make_gates(things, optimizer, advance_on)

    def _frozen_scale(self) -> float | torch.Tensor:
        """Keep the scale as it is now, without reading it."""
        known = self._rule.known(self)
        if known is not None:
            return known
        scale, _ = self._check_scale_growth_tracker("step")
        if self._frozen is None or self._frozen[0] != scale._version:
            self._frozen = (scale._version, scale.detach().clone())
        return self._frozen[1]

    def _report(
        self, optimizer: Any, record: dict[str, Any], scale: float | torch.Tensor
    ) -> LastStep:
        """Note what became of a step; look for culprits if the host knows of any."""
        found = apply.combined(record["found_inf_per_device"], self._home())
        report = LastStep(self, optimizer, found, scale)
        if "parts" in record or "norm" in record:
            report._norm, report._parts = record.get("norm"), record.get("parts")
        if "handed" in record:
            report._handed = record["handed"]
        report._applied = record.get("finite") if found is not None else False
        report._losses = tuple(self._losses)
        report._mark = first_of(optimizer)
        if report._applied is False and found is not None:
            report.stale = self._guide.stale(optimizer)
            self._guide.remember(optimizer, self._culprits(optimizer, report))
        else:
            self._guide.sound.discard(id(optimizer))
        self._last, self._untold = report, None
        self._reports[id(optimizer)] = record["report"] = report
        return report

    def _report_traced(self, outcome: traced.Outcome) -> None:
        """Tell of a step that a compiled graph took."""
        self._untold = None
        optimizer, scale = outcome.optimizer, outcome.scale
        report = LastStep(
            self, optimizer, outcome.found, 1.0 if scale is None else scale
        )
        report._norm, report._next = outcome.norm, outcome.next_scale
        report._losses = () if outcome.loss is None else (outcome.loss,)
        report._mark = first_of(optimizer)
        self._last = self._reports[id(optimizer)] = report

    def _report_unscaled(self, optimizer: Any) -> None:
        """Note a step of a scaler that is off: applied, whatever it was."""
        report = LastStep(self, optimizer, None, 1.0)
        report._applied, report._next = True, 1.0
        report._mark = first_of(optimizer)
        self._last = self._reports[id(optimizer)] = report

    def _offenders_of(self, optimizer: Any, report: LastStep) -> tuple[str, ...]:
        """Name the parameters whose gradients were not finite.  Reads on the host."""
        if report._parts is None and not still_there(optimizer, report._mark):
            return ()  # the gradients are those of a later step by now
        self._culprits(optimizer, report)
        return report._offenders or ()

    def _culprits(self, optimizer: Any, report: LastStep) -> list[torch.Tensor]:
        """Find them, and note their names and groups."""
        found = self._nonfinite(optimizer, report)
        report._offenders = self._names.of(optimizer, found)
        ids = set(map(id, found))
        report._groups = tuple(
            index
            for index, group in enumerate(optimizer.param_groups)
            if any(id(param) in ids for param in group["params"])
        )
        return found

    def _nonfinite(self, optimizer: Any, report: LastStep) -> list[torch.Tensor]:
        """Look at the survey's norms, if it took any; else at the gradients, now."""
        fresh = report._mark and not still_there(optimizer, report._mark)
        now = [] if fresh else survey.offenders(optimizer)
        if report._parts is None:
            return now
        owners, norms = report._parts
        sizes = backend.read(list(norms))
        found = [
            owner
            for reference, size in zip(owners, sizes, strict=True)
            if not isfinite(size) and (owner := reference()) is not None
        ]
        # A norm can overflow alone: while the gradients are there they decide.
        kept = [owner for owner in found if any(owner is other for other in now)]
        return kept or found

    def _norm_of(self, optimizer: Any, report: LastStep) -> torch.Tensor | None:
        """Measure the norm of a step's gradients while they are still there."""
        if not still_there(optimizer, report._mark):
            return None
        with torch.no_grad():
            gathered = gather(optimizer)
            if not gathered.grads or self._ranks.groups():
                return None  # none, or shared: one rank alone cannot sum them up
            home = gathered.grads[0].device
            one = torch.ones((), dtype=torch.float32, device=home)
            norm = survey.measure(gathered, 2.0, one).norm
        times = report.multiplied_by()
        if norm is None or times is None:
            # Of unknown size, but an inf is one whatever it is multiplied by.
            return norm if norm is not None and not isfinite(norm.item()) else None
        return norm if times == 1.0 else norm / times

    def _judge(self, report: LastStep) -> Verdict:
        optimizer, sound = report._optimizer(), self._guide.sound
        verdict = verdicts.judge(
            optimizer,
            report._losses,
            list(self._history),
            stale=report.stale,
            sound=id(optimizer) in sound,
        )
        if verdict not in (Verdict.POISONED, Verdict.STALE_GRADS):
            sound.add(id(optimizer))
        return verdict

    def _conclude(self, evidence: Evidence | None) -> None:
        """Tell the watch, the gates and the last steps that the scale has moved."""
        finite = None if evidence is None else evidence.finite
        self._turn += 1
        after = self._frozen_scale()
        records = self._per_optimizer_states.values()
        stepped = [record["report"] for record in records if "report" in record]
        for report in stepped:
            report._next = after
            if finite and report._applied is False:
                finite = False  # skipped for another reason than an overflow
        for listener in self._listeners:
            listener.concluded(self, stepped, evidence)
        try:
            if finite:
                self._watch.applied(self._read_scale)
            elif finite is not None:
                self._tell_watch(stepped)
            elif evidence is not None:
                self._hear_late(evidence.found, stepped)
        finally:
            if self._losses:
                if finite is not False:
                    self._history.append(self._usual_loss(evidence))
                self._losses.clear()
            if self._gates:
                self._open_gates(stepped)

    def _usual_loss(self, evidence: Evidence | None) -> float | torch.Tensor:
        """Take the largest loss of an iteration; NaN if its step was skipped."""
        loss = self._losses[-1]
        if len(self._losses) > 1:
            home = self._home()
            sizes = [backend.number(each, home).abs() for each in self._losses]
            loss = torch.stack(sizes).max()
        if evidence is None or evidence.finite is not None:
            return loss
        loss = backend.number(loss, evidence.found.device)
        return loss.masked_fill(evidence.found.reshape(()) > 0, torch.nan)

    def _tell_watch(self, stepped: list[LastStep]) -> None:
        bad = [report for report in stepped if report._applied is False]
        if bad:
            self._watch.missed(self._read_scale(), partial(_why, bad[0]))
        elif stepped:
            self._watch.applied(self._read_scale)
        else:  # found to be non-finite, and left alone by the user
            losses = backend.read(list(self._losses))
            verdict = judge_losses(losses, backend.read(list(self._history)))
            self._watch.missed(self._read_scale(), lambda: (verdict, ()))

    def _hear_late(self, found: torch.Tensor, stepped: list[LastStep]) -> None:
        """Send off what the host does not know; tell of what has arrived."""
        if torch.compiler.is_compiling():
            return
        gap = torch.zeros_like(found) if self._gap is None else self._gap
        self._gap = None
        scale = self._home_scale().float()
        loss = torch.zeros_like(found)
        if self._losses:
            loss = backend.number(self._losses[-1], found.device)
        self._mail.post(torch.stack([found.float(), scale, gap, loss]))
        for (skipped, then, apart, lost), _ in self._mail.collect():
            if apart:
                raise words_ranks.late_mismatch(then)
            if not skipped:
                self._watch.applied(partial(float, then))
                continue
            verdict = Verdict.SCALE_TOO_HIGH
            if not isfinite(lost):
                verdict = Verdict.FORWARD_NONFINITE
            self._watch.missed(then, partial(_why_late, stepped, verdict), late=verdict)

    def _read_scale(self) -> float:
        known = self._rule.known(self)
        return backend.read([self._home_scale()])[0] if known is None else known

    def _home_scale(self) -> torch.Tensor:
        return self._check_scale_growth_tracker("update")[0]

    def _open_gates(self, stepped: list[LastStep]) -> None:
        for gate in self._gates:
            about = stepped
            if gate.optimizer is not None:
                about = [r for r in stepped if gate.follows(r._optimizer())]
                known = (report._optimizer() for report in self._reports.values())
                if gate.waits_in_vain(stepped=bool(about), others=known):
                    self._guide.say("gate", NEVER_STEPS)
            if about and (gate.attempted or all(report.applied for report in about)):
                gate.advance()


def _why_late(
    stepped: list[LastStep], verdict: Verdict
) -> tuple[Verdict, tuple[str, ...]]:
    """Look closer at the step at hand, if it was skipped like the one told of."""
    if verdict is Verdict.FORWARD_NONFINITE or not stepped or stepped[-1].applied:
        return verdict, ()
    return _why(stepped[-1])


def _why(report: LastStep) -> tuple[Verdict, tuple[str, ...]]:
    return report.verdict, report.offenders
