"""The results of the trainings: a table, and sentences that depend on the figures."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from buoy.demo.columns import Column
from buoy.demo.train import Outcome
from buoy.demo.workloads import Workload

__all__ = ["WITHIN", "Cell", "Claim", "Results"]

WITHIN = 0.02  # of FP32's figure: as good
_WHO = {"none": "Training without scaling", "torch": "torch's GradScaler"}


@dataclass(frozen=True, slots=True)
class Cell:
    """One workload trained one way, over the seeds."""

    outcomes: tuple[Outcome, ...]

    @property
    def score(self) -> float:
        """The figure, averaged over seeds."""
        return statistics.fmean(outcome.score for outcome in self.outcomes)

    @property
    def skipped(self) -> int:
        """Steps that were skipped, over all seeds."""
        return sum(outcome.skipped for outcome in self.outcomes)

    @property
    def finished(self) -> bool:
        """Whether all steps were taken."""
        return all(outcome.finished for outcome in self.outcomes)


@dataclass(frozen=True, slots=True)
class Claim:
    """A sentence about the results, and whether they bear it out."""

    text: str
    held: bool


@dataclass(slots=True)
class Results:
    """Everything that was trained so far."""

    workloads: Sequence[Workload]
    columns: Sequence[Column]
    outcomes: list[Outcome] = field(default_factory=list)

    def cell(self, workload: Workload, column: str) -> Cell | None:
        """Return one cell of the table; None if nothing is known of it."""
        found = [
            outcome
            for outcome in self.outcomes
            if outcome.workload == workload.name and outcome.column == column
        ]
        if not found:
            return None
        return Cell(tuple(sorted(found, key=lambda outcome: outcome.seed)))

    def as_good(self, workload: Workload, column: str) -> bool | None:
        """Return whether a way reached FP32's figure; None if not both are known."""
        own = self.cell(workload, column)
        fp32 = self.cell(workload, "fp32")
        if own is None or fp32 is None:
            return None
        slack = WITHIN * abs(fp32.score)
        if workload.higher:
            return own.score >= fp32.score - slack
        return own.score <= fp32.score + slack

    def failures(self, column: str) -> list[str]:
        """Name the workloads on which a way did not reach FP32's figure."""
        return [w.name for w in self.workloads if self.as_good(w, column) is False]

    def claims(self, *, titles: bool = False) -> list[Claim]:
        """Say what the figures show, good or bad, as far as it is known.

        Workloads are called by their names, or by the titles that the page's table has.
        """
        shown = {w.name: w.title if titles else w.name for w in self.workloads}
        known = {outcome.column for outcome in self.outcomes}
        names = [column.name for column in self.columns if column.name in known]
        if "fp32" not in names:
            return []
        fixed = [name for name in names if name.startswith("static ")]
        said = [self._about(name, shown) for name in names if name in _WHO]
        said += [self._about(name, shown) for name in fixed]
        if "buoy" in names and "torch" in names:
            said.append(self._buoy(shown))
        if "none" in names:
            said.append(self._idle(shown))
        return said

    def _about(self, name: str, shown: dict[str, str]) -> Claim:
        who = _WHO.get(name, f"A {name.replace('static', 'fixed scale of')}")
        failed = [shown[key] for key in self.failures(name)]
        if not failed:
            return Claim(f"{who} reaches FP32 everywhere here.", held=False)
        return Claim(f"{who} falls short of FP32 on {_listed(failed)}.", held=True)

    def _buoy(self, shown: dict[str, str]) -> Claim:
        failed = [shown[key] for key in self.failures("buoy")]
        buoys = self._skips("buoy")
        torchs = self._skips("torch")
        skips = f"{buoys} skipped steps, torch's {torchs}"
        if failed:
            where = _listed(failed)
            text = f"Buoy with its defaults falls short of FP32 on {where}; {skips}."
            return Claim(text, held=False)
        text = f"Buoy with its defaults is within 2 % of FP32 everywhere; {skips}."
        return Claim(text, held=buoys <= torchs)

    def _skips(self, column: str) -> int:
        cells = (self.cell(workload, column) for workload in self.workloads)
        return sum(cell.skipped for cell in cells if cell is not None)

    def _idle(self, shown: dict[str, str]) -> Claim:
        same = [shown[w.name] for w in self.workloads if self.as_good(w, "none")]
        if not same:
            return Claim("Scaling makes a difference on all of these.", held=True)
        return Claim(f"Scaling makes no difference on {_listed(same)}.", held=True)

    def as_dict(self) -> dict[str, object]:
        """Return everything as plain values, the same in every run of the same demo."""
        return {
            "workloads": [
                {
                    "name": workload.name,
                    "title": workload.title,
                    "metric": workload.metric,
                    "higher_is_better": workload.higher,
                    "fp16": workload.precision,
                    "columns": list(self._cells(workload)),
                }
                for workload in self.workloads
            ],
            "claims": [{"text": c.text, "held": c.held} for c in self.claims()],
        }

    def _cells(self, workload: Workload) -> Iterator[dict[str, object]]:
        for column in self.columns:
            cell = self.cell(workload, column.name)
            if cell is None:
                continue
            yield {
                "name": column.name,
                "score": cell.score,
                "scores": [outcome.score for outcome in cell.outcomes],
                "seeds": [outcome.seed for outcome in cell.outcomes],
                "skipped": [outcome.skipped for outcome in cell.outcomes],
                "steps": [outcome.steps for outcome in cell.outcomes],
                "as_good_as_fp32": self.as_good(workload, column.name),
                "finished": cell.finished,
            }


def _listed(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    return ", ".join(names[:-1]) + " and " + names[-1]
