"""Read the rows of a recorded run out of its database, as columns of numbers.

Some hundred rows at once: as tuples, all rows of a long run would fill the memory.
"""

import math
import sqlite3
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

from buoy._core.errors import TraceError
from buoy._core.verdicts import Verdict
from buoy.trace.columns import MEASURED, Rows
from buoy.trace.counts import Kind

__all__ = ["COLUMNS", "MOST_ROWS", "Tensors", "odd_entry", "read_rows"]

MOST_ROWS = 20_000_000
COLUMNS = ("scale", "time", *MEASURED)
# Of skips; one without a verdict counts as it does for `Recorder.step`.
_VERDICTS = {verdict.value: verdict for verdict in Verdict if verdict != "applied"}
_KNOWN_VERDICTS = {None, "applied", *_VERDICTS}
_CHUNK = 2**8  # rows that are read at once

Tensors = dict[int, tuple[str, int, Kind]]


def read_rows(
    where: str,
    file: sqlite3.Connection,
    after: int,
    tensors: Tensors,
    max_log2: float,
    columns: Sequence[str] = COLUMNS,
) -> Rows:
    """Read the rows after a step, each value checked for its type.

    Of the numbers only `columns`; the others are NaN.
    """
    rows = Rows()
    last = after
    cursor = file.execute(
        f"SELECT step, applied, verdict, {', '.join(columns)} FROM steps "  # noqa: S608
        "WHERE step > ? ORDER BY step LIMIT ?",
        (after, MOST_ROWS),
    )
    while chunk := cursor.fetchmany(_CHUNK):
        steps, applied, verdicts, *numbers = zip(*chunk, strict=True)
        if steps[0] <= last:  # the file's pages contradict each other
            raise odd_entry(where, "steps", steps[0])
        last = steps[-1]
        start = len(rows)
        rows.step.extend(steps)
        if {*applied} != {1} or {*verdicts} != {None}:
            _add_skips(where, rows, start, zip(applied, verdicts, strict=True))
        else:
            rows.applied.extend(b"\1" * len(steps))
        for name, values in zip(columns, numbers, strict=True):
            try:
                column = array("d", values)
            except TypeError:  # None and text
                column = array("d", _checked(where, rows, start, name, values))
            getattr(rows, name).extend(column)
    for name in {*COLUMNS} - {*columns}:
        getattr(rows, name).extend(array("d", [math.nan]) * len(rows))
    rows.max_log2.extend(array("d", [max_log2]) * len(rows))
    _add_offenders(where, file, after, rows, tensors)
    return rows


def _add_skips(
    where: str, rows: Rows, start: int, outcomes: Iterator[tuple[Any, Any]]
) -> None:
    for place, (applied, verdict) in enumerate(outcomes, start):
        if applied not in (0, 1) or verdict not in _KNOWN_VERDICTS:
            raise odd_entry(where, "steps", rows.step[place])
        rows.applied.append(bool(applied))
        if not applied:
            rows.verdicts[place] = _VERDICTS.get(verdict, Verdict.SCALE_TOO_HIGH)


def _checked(
    where: str, rows: Rows, start: int, name: str, values: Sequence[Any]
) -> Iterator[float]:
    """Yield a column's numbers, NaN for NULL; SQLite has no NaN, so it is a text."""
    for place, value in enumerate(values, start):
        if type(value) is float:
            yield value
        elif name in MEASURED and (value is None or value == "nan"):
            yield math.nan
            if value is not None:
                rows.not_numbers[name].add(place)
        else:
            raise odd_entry(where, "steps", rows.step[place])


def _add_offenders(
    where: str, file: sqlite3.Connection, after: int, rows: Rows, tensors: Tensors
) -> None:
    accused: dict[int, list[str]] = {}
    for step, number in file.execute(
        "SELECT step, tensor FROM offenders WHERE step > ? LIMIT ?",
        (after, MOST_ROWS),
    ):
        if type(step) is not int or number not in tensors:
            raise odd_entry(where, "offenders", step)
        accused.setdefault(step, []).append(tensors[number][0])
    for step, names in accused.items():
        place = bisect_left(rows.step, step)
        if rows.step[place : place + 1] == array("q", [step]):
            rows.offenders[place] = tuple(names)


def odd_entry(where: str, table: str, key: object) -> TraceError:
    """Return the error about an entry that Buoy does not write."""
    return TraceError(
        f"The trace {where!r} is damaged: the entry {key!r:.40} of its table {table!r} "
        "is not what Buoy writes. Record it again."
    )
