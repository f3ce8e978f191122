"""Read a recorded run: while it is written, after a kill, or from an untrusted source.

The file is data.  It is opened for reading only, its schema must be ours to the letter
(see `schema`), every value is checked for its type, and sizes are bounded.
"""

import contextlib
import json
import math
import os
import sqlite3
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import not_
from pathlib import Path
from typing import Any
from urllib.parse import quote

from buoy._core.errors import TraceError
from buoy._core.formats import FORMATS
from buoy._core.replay.trace import FP16_MAX_LOG2
from buoy._core.state import Verdict
from buoy.trace.columns import Rows
from buoy.trace.counts import Counts, Kind, unpack, unpacked_size
from buoy.trace.files import check_readable
from buoy.trace.row import Row
from buoy.trace.schema import APPLICATION, MAGIC, TABLES, VERSION

__all__ = ["Recording", "Shot", "load"]

_MOST_ROWS = 20_000_000
_MOST_SHOTS = 100_000
_MOST_BLOB = 2**24
_LEAST_UNPACKED = 2**26  # bytes; a file may unpack to this, or to 16 times its size
# Of skips; one without a verdict counts as it does for `Recorder.step`.
_VERDICTS = {verdict.value: verdict for verdict in Verdict if verdict != "applied"}
_KNOWN_VERDICTS = {None, "applied", *_VERDICTS}
_CHUNK = 2**16  # rows that are read at once


@dataclass(frozen=True, slots=True)
class Shot:
    """The sizes of the scaled gradients at one step."""

    step: int
    scale: float
    tensors: dict[str, Counts]


@dataclass(frozen=True, slots=True, repr=False)
class Recording:
    """The contents of a file at the time of reading."""

    path: str
    meta: dict[str, Any] = field(default_factory=dict)
    rows: Sequence[Row] = ()
    shots: list[Shot] = field(default_factory=list)
    counted: tuple[int, int] | None = None  # steps and skips of all that is in the file

    def __repr__(self) -> str:
        return (
            f"Recording({self.path!r}, {len(self.rows)} rows, "
            f"{len(self.shots)} sets of histograms)"
        )

    @property
    def name(self) -> str:
        """The name of the run, or of its file."""
        name = self.meta.get("name")
        return name if isinstance(name, str) and name else Path(self.path).stem

    @property
    def lost(self) -> int:
        """The number of rows that were dropped because the disk was too slow."""
        lost = self.meta.get("lost", 0)
        return lost if type(lost) is int else 0

    @property
    def ended(self) -> bool:
        """Whether the run closed its file; False after a kill."""
        return "ended" in self.meta

    @property
    def max_log2(self) -> float:
        """log2 of the largest number of the run's format."""
        return _max_log2(self.meta)


def load(
    path: str | os.PathLike[str],
    *,
    after: int = -1,
    shots_after: int = -1,
    latest: int | None = None,
    latest_shots: int | None = None,
) -> Recording:
    """Read a recorded run, or raise `TraceError`.

    To follow a run, `after` and `shots_after` leave out the rows and the histograms up
    to that step.  `latest` and `latest_shots` read only that many, the last ones;
    `counted` counts all rows after `after`.

    Example:
        >>> load("no/such.buoy")
        Traceback (most recent call last):
          ...
        buoy._core.errors.TraceError: There is no trace 'no/such.buoy'. ...
    """
    where = os.fspath(path)
    _check_head(where)
    try:
        with _opened(where) as file:
            _check_schema(where, file)
            return _contents(
                where,
                file,
                (after, _MOST_ROWS if latest is None else latest),
                (shots_after, _MOST_SHOTS if latest_shots is None else latest_shots),
            )
    except (sqlite3.Error, UnicodeDecodeError, OverflowError, MemoryError) as error:
        reason = str(error) or "a size in it is far too large"
        message = f"The trace {where!r} is damaged: {reason}. Record it again."
        raise TraceError(message) from error


def _check_head(where: str) -> None:
    check_readable(where)
    try:
        with Path(where).open("rb") as file:
            head = file.read(100)
    except OSError as error:
        reason = error.strerror or error
        message = f"Cannot read the trace {where!r}: {reason}. Check the file."
        raise TraceError(message) from error
    mine = head[68:72] == APPLICATION.to_bytes(4, "big")
    if not head.startswith(MAGIC) or not mine:
        message = (
            f"The file {where!r} is not a run recorded by Buoy. Read one that "
            '`GradScaler(trace="run.buoy")` or `buoy.trace.Recorder` has written.'
        )
        raise TraceError(message)


@contextlib.contextmanager
def _opened(where: str) -> Iterator[sqlite3.Connection]:
    try:
        file = _connected(where, "mode=ro")
    except sqlite3.OperationalError:
        # A WAL beside it that this user may not touch: read the file as it is.
        file = _connected(where, "mode=ro&immutable=1")
    try:
        yield file
    finally:
        file.close()


def _connected(where: str, how: str) -> sqlite3.Connection:
    location = quote(str(Path(where).absolute()))
    file = sqlite3.connect(f"file:{location}?{how}", uri=True, timeout=5.0)
    try:
        for pragma in (
            "trusted_schema = OFF",
            "query_only = ON",
            "cell_size_check = ON",
        ):
            file.execute(f"PRAGMA {pragma}")
        file.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MOST_BLOB)
        file.isolation_level = None
        file.execute("BEGIN")  # one moment for all that is read
        file.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.Error:
        file.close()
        raise
    return file


def _check_schema(where: str, file: sqlite3.Connection) -> None:
    version = file.execute("PRAGMA user_version").fetchone()[0]
    if version > VERSION:
        message = (
            f"The trace {where!r} is of version {version}; this Buoy reads up to "
            f"{VERSION}. Upgrade with `pip install -U buoy-amp`."
        )
        raise TraceError(message)
    found = dict(file.execute("SELECT name, sql FROM sqlite_master").fetchall())
    if found != TABLES:
        strange = sorted({*found} ^ {*TABLES}) or ["a table of another shape"]
        message = (
            f"The file {where!r} is not a run recorded by Buoy: {strange!r:.80}. It "
            "was not read any further."
        )
        raise TraceError(message)


Part = tuple[int, int]  # after which step, and how many at the most, the last ones


def _contents(
    where: str, file: sqlite3.Connection, rows: Part, shots: Part
) -> Recording:
    meta = _meta(where, file)
    tensors = _tensors(where, file)
    return Recording(
        path=where,
        meta=meta,
        rows=_rows(where, file, rows, tensors, _max_log2(meta)),
        shots=_shots(where, file, shots, tensors),
        counted=_counted(file, rows[0]),
    )


def _max_log2(meta: dict[str, Any]) -> float:
    chosen = FORMATS.get(str(meta.get("format")))
    return FP16_MAX_LOG2 if chosen is None else chosen.max_log2


def _meta(where: str, file: sqlite3.Connection) -> dict[str, Any]:
    found = {}
    for key, value in file.execute("SELECT key, value FROM meta LIMIT 10000"):
        if type(key) is not str or type(value) is not str:
            raise _odd(where, "meta", key)
        try:
            found[key] = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise _odd(where, "meta", key) from error
    return found


Tensors = dict[int, tuple[str, int, Kind]]


def _tensors(where: str, file: sqlite3.Connection) -> Tensors:
    found: Tensors = {}
    for number, name, size, kind in file.execute("SELECT * FROM tensors LIMIT 1000000"):
        if type(name) is not str or type(size) is not int:
            raise _odd(where, "tensors", number)
        if kind not in ("weight", "activation"):
            raise _odd(where, "tensors", number)
        found[number] = (name, size, kind)
    return found


def _rows(
    where: str,
    file: sqlite3.Connection,
    part: Part,
    tensors: Tensors,
    max_log2: float,
) -> Rows:
    accused: dict[int, list[str]] = {}
    after = _before_the_last(file, "steps", part)
    for step, number in file.execute(
        "SELECT step, tensor FROM offenders WHERE step > ? LIMIT ?",
        (after, _MOST_ROWS),
    ):
        if number not in tensors:
            raise _odd(where, "offenders", step)
        accused.setdefault(step, []).append(tensors[number][0])
    cursor = file.execute(
        "SELECT step, time, scale, applied, verdict, norm, amax, loss FROM steps "
        "WHERE step > ? ORDER BY step LIMIT ?",
        (after, _MOST_ROWS),
    )
    rows = Rows()
    while chunk := cursor.fetchmany(_CHUNK):
        _add(where, rows, list(zip(*chunk, strict=True)), accused)
    rows.max_log2.extend(array("d", [max_log2]) * len(rows))
    return rows


def _add(
    where: str,
    rows: Rows,
    columns: list[tuple[Any, ...]],
    accused: dict[int, list[str]],
) -> None:
    """Add rows that were read, each column checked as a whole."""
    steps, times, scales, applied, verdicts, *measured = columns
    start = len(rows)
    fine = set(map(type, times)) | set(map(type, scales)) == {float}
    fine = fine and set(applied) <= {0, 1} and set(verdicts) <= _KNOWN_VERDICTS
    if not fine:
        raise _odd(where, "steps", _first_odd(columns))
    rows.step.extend(steps)
    rows.time.extend(times)
    rows.scale.extend(scales)
    rows.applied.extend(map(int, applied))
    rows.extend_measured(start, [_numbers(where, steps, values) for values in measured])
    for at in compress(range(len(steps)), map(not_, applied)):
        rows.verdicts[start + at] = _VERDICTS.get(verdicts[at], Verdict.SCALE_TOO_HIGH)
    if accused:
        for at in compress(range(len(steps)), map(accused.__contains__, steps)):
            rows.offenders[start + at] = tuple(accused[steps[at]])


def _before_the_last(file: sqlite3.Connection, table: str, part: Part) -> int:
    """Return the step after which the last so many entries of a table lie."""
    after, most = part
    last = file.execute(
        f"SELECT step FROM {table} ORDER BY step DESC LIMIT 1 OFFSET ?",  # noqa: S608
        (most,),
    ).fetchone()
    return after if last is None else max(after, last[0])


def _counted(file: sqlite3.Connection, after: int) -> tuple[int, int]:
    steps, applied = file.execute(
        "SELECT count(*), total(applied) FROM steps WHERE step > ?", (after,)
    ).fetchone()
    return steps, steps - int(applied)


def _first_odd(columns: Sequence[Sequence[Any]]) -> Any:
    for step, time, scale, applied, verdict, *_ in zip(*columns, strict=True):
        fine = type(time) is float and type(scale) is float and applied in (0, 1)
        if not fine or verdict not in _KNOWN_VERDICTS:
            return step
    return None


def _numbers(
    where: str, steps: Sequence[int], values: Sequence[Any]
) -> Sequence[float | None]:
    """Return a column that was measured; SQLite has no NaN, so it is a text."""
    if set(map(type, values)) <= {float, type(None)}:
        return values
    for step, value in zip(steps, values, strict=True):
        if not (value is None or type(value) is float or value == "nan"):
            raise _odd(where, "steps", step)
    return [math.nan if value == "nan" else value for value in values]


def _shots(
    where: str, file: sqlite3.Connection, part: Part, tensors: Tensors
) -> list[Shot]:
    found = []
    after = _before_the_last(file, "histograms", part)
    left = _most_unpacked(where)
    for step, scale, packed in file.execute(
        "SELECT step, scale, packed FROM histograms WHERE step > ? ORDER BY step",
        (after,),
    ):
        if type(scale) is not float or type(packed) is not bytes:
            raise _odd(where, "histograms", step)
        try:
            seen = unpack(packed, tensors, left)
            left -= unpacked_size(seen)
            found.append(Shot(step, scale, seen))
        except TraceError as error:
            message = f"The trace {where!r} is damaged at step {step}: {error}."
            raise TraceError(message) from error
    return found


def _most_unpacked(where: str) -> int:
    """Return how many bytes all histograms together may be, unpacked."""
    files = (Path(where), Path(f"{where}-wal"))
    return max(_LEAST_UNPACKED, 16 * sum(f.stat().st_size for f in files if f.exists()))


def _odd(where: str, table: str, key: Any) -> TraceError:
    return TraceError(
        f"The trace {where!r} is damaged: the entry {key!r:.40} of its table {table!r} "
        "is not what Buoy writes. Record it again."
    )
