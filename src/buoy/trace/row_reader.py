"""Read the rows of a recorded run out of its database, as columns of numbers.

Rows go through Python as tuples, which is what takes the time.  So most columns are not
among them: steps without gaps are a range, and flags and verdicts are read only where a
step was skipped.  The numbers are packed as they come, some hundred rows at once.
"""

import math
import sqlite3
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from struct import error as struct_error
from struct import pack
from typing import Any

from buoy._core.errors import TraceError
from buoy._core.state import Verdict
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
    accused: dict[int, list[str]] = {}
    for step, number in file.execute(
        "SELECT step, tensor FROM offenders WHERE step > ? LIMIT ?",
        (after, MOST_ROWS),
    ):
        if type(step) is not int or number not in tensors:
            raise odd_entry(where, "offenders", step)
        accused.setdefault(step, []).append(tensors[number][0])
    rows = Rows()
    rows.step.extend(_steps(file, after))
    rows.applied.extend(b"\1" * len(rows))
    for step, applied, verdict in file.execute(
        "SELECT step, applied, verdict FROM steps WHERE step > ? "
        "AND (applied IS NOT 1 OR verdict IS NOT NULL) ORDER BY step LIMIT ?",
        (after, MOST_ROWS),
    ):
        if applied not in (0, 1) or verdict not in _KNOWN_VERDICTS:
            raise odd_entry(where, "steps", step)
        place = _place(rows, step)
        if not applied and place is not None:
            rows.applied[place] = 0
            rows.verdicts[place] = _VERDICTS.get(verdict, Verdict.SCALE_TOO_HIGH)
    _add_numbers(where, file, after, rows, columns)
    for step, names in accused.items():
        place = _place(rows, step)
        if place is not None:
            rows.offenders[place] = tuple(names)
    rows.max_log2.extend(array("d", [max_log2]) * len(rows))
    return rows


def _place(rows: Rows, step: int) -> int | None:
    place = bisect_left(rows.step, step)
    return place if rows.step[place : place + 1] == array("q", [step]) else None


def _steps(file: sqlite3.Connection, after: int) -> Iterable[int]:
    """Return the steps in order; those of most runs have no gaps."""
    first, last, count = (
        file.execute(query, (after,)).fetchone()[0]
        for query in (  # one query for all three takes twice as long
            "SELECT min(step) FROM steps WHERE step > ?",
            "SELECT max(step) FROM steps WHERE step > ?",
            "SELECT count(*) FROM steps WHERE step > ?",
        )
    )
    if not count or last - first == count - 1:
        return range(first, last + 1) if count else ()
    cursor = file.execute(
        "SELECT step FROM steps WHERE step > ? ORDER BY step LIMIT ?",
        (after, MOST_ROWS),
    )
    return chain.from_iterable(cursor)


def _add_numbers(
    where: str,
    file: sqlite3.Connection,
    after: int,
    rows: Rows,
    wanted: Sequence[str],
) -> None:
    """Add the columns of numbers: read row by row, but kept flat and cut by strides."""
    some = "SELECT 1 FROM steps WHERE step > ? AND {} IS NOT NULL LIMIT 1"
    names = [
        name
        for name in wanted
        if name not in MEASURED or file.execute(some.format(name), (after,)).fetchone()
    ]
    cursor = file.execute(
        f"SELECT {', '.join(names)} FROM steps WHERE step > ? ORDER BY step "  # noqa: S608
        "LIMIT ?",
        (after, MOST_ROWS),
    )
    columns, width = [getattr(rows, name) for name in names], len(names)
    while chunk := cursor.fetchmany(_CHUNK):
        if len(rows.scale) + len(chunk) > len(rows):
            break  # its pages contradict each other
        block = array("d")
        try:
            packed = pack(f"{width * len(chunk)}d", *chain.from_iterable(chunk))
            block.frombytes(packed)
        except struct_error:  # at None and text
            block.extend(_checked(where, rows, names, chunk))
        for i, column in enumerate(columns):
            column.extend(block[i::width])
    if len(rows.scale) != len(rows):
        raise odd_entry(where, "steps", len(rows.scale))
    for name in set(COLUMNS) - set(names):
        getattr(rows, name).extend(array("d", [math.nan]) * len(rows))


def _checked(
    where: str, rows: Rows, names: Sequence[str], chunk: Sequence[tuple[Any, ...]]
) -> Iterator[float]:
    """Yield the numbers of rows, NaN for NULL; SQLite has no NaN, so it is a text."""
    for place, values in enumerate(chunk, len(rows.scale)):
        for name, value in zip(names, values, strict=True):
            if type(value) is float:
                yield value
            elif name in MEASURED and (value is None or value == "nan"):
                yield math.nan
                if value is not None:
                    rows.not_numbers[name].add(place)
            else:
                raise odd_entry(where, "steps", rows.step[place])


def odd_entry(where: str, table: str, key: Any) -> TraceError:
    """Return the error about an entry that Buoy does not write."""
    return TraceError(
        f"The trace {where!r} is damaged: the entry {key!r:.40} of its table {table!r} "
        "is not what Buoy writes. Record it again."
    )
