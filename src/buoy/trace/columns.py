"""The rows of a recorded run, held as columns of plain numbers.

A row as an object takes ten times the memory of its numbers, and most time of a long
run's report would go into making it.  Rows are made when they are asked for.
"""

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from buoy._core.step import Row
from buoy._core.verdicts import Verdict

__all__ = ["MEASURED", "Rows", "columns_of"]

MEASURED = ("norm", "amax", "loss")


class Rows(Sequence[Row]):
    """Rows in the order of their steps, as columns.

    In `norm`, `amax` and `loss`, NaN also stands for what was not measured; the rows
    that are given out tell one from the other.

    Example:
        >>> rows = Rows.of([Row(3, 8.0, True, amax=0.5), Row(4, 8.0, False)])
        >>> rows.scale, rows.amax, rows.skipped
        (array('d', [8.0, 8.0]), array('d', [0.5, nan]), [1])
        >>> rows[-1].amax is None
        True
    """

    def __init__(self) -> None:
        self.step = array("q")
        self.time = array("d")
        self.scale = array("d")
        self.applied = bytearray()
        self.norm = array("d")
        self.amax = array("d")
        self.loss = array("d")
        self.max_log2 = array("d")
        self.verdicts: dict[int, Verdict] = {}  # of the rows that have another
        self.offenders: dict[int, tuple[str, ...]] = {}
        self.not_numbers: dict[str, set[int]] = {name: set() for name in MEASURED}
        self._headroom: array[float] | None = None

    @classmethod
    def of(cls, rows: Iterable[Row]) -> "Rows":
        """Take rows apart."""
        made = cls()
        rows = list(rows)
        made.step.extend(row.step for row in rows)
        made.time.extend(row.time for row in rows)
        made.scale.extend(row.scale for row in rows)
        made.applied.extend(bool(row.applied) for row in rows)
        made.max_log2.extend(row.max_log2 for row in rows)
        for name in MEASURED:
            column = getattr(made, name)
            for at, row in enumerate(rows):
                value = getattr(row, name)
                column.append(math.nan if value is None else value)
                if value is not None and math.isnan(value):
                    made.not_numbers[name].add(at)
        for at, row in enumerate(rows):
            if row.verdict is not Verdict.APPLIED:
                made.verdicts[at] = row.verdict
            if row.offenders:
                made.offenders[at] = row.offenders
        return made

    def __len__(self) -> int:
        return len(self.step)

    @overload
    def __getitem__(self, at: int) -> Row: ...
    @overload
    def __getitem__(self, at: slice) -> list[Row]: ...
    def __getitem__(self, at: int | slice) -> Row | list[Row]:
        if isinstance(at, slice):
            return [self._row(i) for i in range(*at.indices(len(self)))]
        return self._row(range(len(self))[at])

    def __iter__(self) -> Iterator[Row]:
        return map(self._row, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or len(other) != len(self):
            return False
        return all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment] # a mutable sequence

    def _row(self, at: int) -> Row:
        return Row(
            step=self.step[at],
            scale=self.scale[at],
            applied=bool(self.applied[at]),
            verdict=self.verdicts.get(at, Verdict.APPLIED),
            norm=self._measured("norm", at),
            amax=self._measured("amax", at),
            loss=self._measured("loss", at),
            offenders=self.offenders.get(at, ()),
            time=self.time[at],
            max_log2=self.max_log2[at],
        )

    def _measured(self, name: str, at: int) -> float | None:
        value: float = getattr(self, name)[at]
        unknown = math.isnan(value) and at not in self.not_numbers[name]
        return None if unknown else value

    @property
    def skipped(self) -> list[int]:
        """The places of the rows that were not applied."""
        places = []
        at = self.applied.find(0)
        while at >= 0:
            places.append(at)
            at = self.applied.find(0, at + 1)
        return places

    @property
    def headroom(self) -> "array[float]":
        """The rows' `headroom`; NaN where there is none."""
        if self._headroom is None or len(self._headroom) != len(self):
            self._headroom = array("d", self._headrooms())
        return self._headroom

    def _headrooms(self) -> Iterable[float]:
        try:
            import numpy as np  # noqa: PLC0415 - ten times faster, where it is there
        except ImportError:
            return self._plain_headrooms()
        amax, scale, limit = map(np.asarray, (self.amax, self.scale, self.max_log2))
        known = (amax > 0.0) & (amax < math.inf) & (scale > 0.0)
        empty = np.full(len(self), math.nan)
        top = np.log2(amax, out=empty, where=known)
        bits = limit - top - np.log2(scale, out=np.zeros(len(self)), where=known)
        return array("d", bits.tobytes())

    def _plain_headrooms(self) -> Iterator[float]:
        log2 = math.log2
        nan = math.nan
        infinity = math.inf
        before = None
        height = nan
        for amax, scale, limit in zip(
            self.amax, self.scale, self.max_log2, strict=True
        ):
            if scale != before:
                before = scale
                height = log2(scale) if scale > 0.0 else nan
            yield limit - log2(amax) - height if 0.0 < amax < infinity else nan


def columns_of(rows: Sequence[Row]) -> Rows:
    """Return the rows as columns: themselves, if they are."""
    return rows if isinstance(rows, Rows) else Rows.of(rows)
