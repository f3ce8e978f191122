"""The contents of a page: runs, each with a label and further data."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from buoy._core.errors import TraceError
from buoy.report.facts import Facts, Shares, share_points, sum_up
from buoy.trace.columns import Rows, columns_of
from buoy.trace.recording import Recording, load

__all__ = ["Run"]

Series = Sequence[float] | Mapping[int, float]


@dataclass(frozen=True)
class Run:
    """One run on a page.

    Args:
        trace: the recorded file, or the result of `buoy.trace.load`.
        label: its name on the page; the run's own name by default.
        series: more curves, by name: a number per recorded step, or numbers by step.
        facts: more figures for the comparison of several runs, as text.
        note: a sentence under the run's name.

    Example:
        >>> from buoy.trace.recording import Recording
        >>> run = Run(Recording("run.buoy"), series={"accuracy": {0: 0.1, 100: 0.9}})
        >>> run.label, run.curve("accuracy")
        ('run', ([0, 100], [0.1, 0.9]))
    """

    trace: str | os.PathLike[str] | Recording
    label: str = ""
    series: Mapping[str, Series] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    recording: Recording = field(init=False, repr=False)

    def __post_init__(self) -> None:
        found = self.trace if isinstance(self.trace, Recording) else load(self.trace)
        object.__setattr__(self, "recording", found)
        object.__setattr__(self, "label", self.label or found.name)

    @cached_property
    def rows(self) -> Rows:
        """The recorded steps, as columns."""
        return columns_of(self.recording.rows)

    @cached_property
    def figures(self) -> Facts:
        """The summary of the run, computed once."""
        return sum_up(self.recording)

    @cached_property
    def points(self) -> list[tuple[int, Shares]]:
        """Where the gradients lay, step by step, computed once."""
        return share_points(self.recording)

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """Return the steps and values of one of the further curves."""
        values = self.series[name]
        if isinstance(values, Mapping):
            return list(values), [float(value) for value in values.values()]
        steps = self.rows.step.tolist()
        if len(steps) != len(values):
            message = (
                f"The series {name!r} of {self.label!r} must hold a number for each of "
                f"the {len(steps)} recorded steps, got {len(values)}. Give a dict of "
                "step to value for fewer."
            )
            raise TraceError(message)
        return steps, [float(value) for value in values]
