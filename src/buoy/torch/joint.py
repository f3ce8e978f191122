"""All step or none: take back the steps of an iteration in which another one failed.

Each optimizer steps when it is told to, as in any alternating loop, from a copy of its
weights and state; one that comes after a failure does not step at all, and `update`
puts back those that came before.  What each policy learns is its own gradients' check.
"""

from typing import Any, NamedTuple

import torch

from buoy._backends import torch as backend
from buoy.torch import apply
from buoy.torch.start import StartingPoint
from buoy.torch.step import LastStep
from buoy.torch.undo import Undo

__all__ = ["Joint"]


class _Taken(NamedTuple):
    record: dict[str, Any]
    undo: Undo | StartingPoint
    report: list[LastStep]  # one, once the step was taken


class Joint:
    """The steps of one iteration, over all groups of a scaler."""

    def __init__(self) -> None:
        self._taken: list[_Taken] = []

    def before(self, optimizer: Any, record: dict[str, Any], home: Any) -> None:
        """Hand on the failures so far, and copy what the step is about to change."""
        if self._taken:
            earlier = apply.combined(
                self._taken[-1].record["found_inf_per_device"], home
            )
            if earlier is not None:
                apply.add_cause(record, earlier, home)
        self._taken.append(_Taken(record, Undo(optimizer), []))

    def adopt(self, record: dict[str, Any], start: StartingPoint, home: Any) -> None:
        """Take in a step that was taken already, with a closure; or take it back."""
        if self._taken:
            earlier = apply.combined(
                self._taken[-1].record["found_inf_per_device"], home
            )
            if earlier is not None and backend.read([earlier])[0]:
                apply.add_cause(record, earlier, home)
                if record["finite"]:
                    start.restore()
                record["finite"] = False
        self._taken.append(_Taken(record, start, []))

    def after(self, record: dict[str, Any], report: LastStep) -> None:
        """Note what was said of a step."""
        for taken in self._taken:
            if taken.record is record:
                taken.report.append(report)

    def settle(self, home: Any, *, may_ask: bool) -> None:
        """Decide for all; the last flag holds those of all before it."""
        taken, self._taken = self._taken, []
        taken = [one for one in taken if one.report]
        if len(taken) < 2:
            return
        last = taken[-1]
        found = apply.combined(last.record["found_inf_per_device"], home)
        finite: bool | None = last.record.get("finite")
        if finite or found is None:
            return
        if finite is None and may_ask:
            finite = not backend.read([found])[0]
        for one in taken:
            _put_back(one, found, finite)
        if finite is False:
            _name_the_cause(taken)


def _put_back(one: _Taken, found: torch.Tensor, finite: bool | None) -> None:
    if finite is None:
        one.undo.where(found > 0)
    elif finite is False and one.record.get("finite") is not False:
        one.undo.now()
    report = one.report[-1]
    report.found, report._applied = found, finite
    report._verdict = None


def _name_the_cause(taken: list[_Taken]) -> None:
    """Let the others say what the one that failed says."""
    failed = [one for one in taken if _failed_itself(one)]
    if not failed:
        return
    culprit = failed[0].report[-1]
    for one in taken:
        if all(one is not other for other in failed):
            report = one.report[-1]
            report.judged(culprit.verdict)
            report._offenders, report.partner = culprit.offenders, True


def _failed_itself(one: _Taken) -> bool:
    spike = one.record.get("spike")
    flags = [*apply.own(one.record).values()]
    flags += [] if spike is None else [spike]
    return any(backend.read(flags))
