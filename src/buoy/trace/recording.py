"""Read a recorded run: while it is written, after a kill, or from an untrusted source.

The file is data.  It is opened for reading only, its schema must be ours to the letter
(see `schema`), every value is checked for its type, and sizes are bounded.
"""

import contextlib
import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from buoy._core.errors import TraceError
from buoy._core.formats import FORMATS, FP16_MAX_LOG2
from buoy._core.step import Row
from buoy.trace.counts import Shot, unpack, unpacked_size
from buoy.trace.files import check_readable
from buoy.trace.row_reader import COLUMNS, MOST_ROWS, Tensors, odd_entry, read_rows
from buoy.trace.schema import APPLICATION, MAGIC, TABLES, VERSION

__all__ = ["Recording", "load", "load_sizes"]

_MOST_SHOTS = 100_000
_MOST_BLOB = 2**24
_LEAST_UNPACKED = 2**26  # bytes; a file may unpack to this, or to 16 times its size


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


Part = tuple[int, int]  # after which step, and how many at the most, the last ones


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
    rows = (after, MOST_ROWS if latest is None else latest)
    shots = (shots_after, _MOST_SHOTS if latest_shots is None else latest_shots)
    return _loaded(os.fspath(path), rows, shots, COLUMNS)


def load_sizes(path: str | os.PathLike[str]) -> Recording:
    """Read what a replay needs: in the rows, times and norms are NaN."""
    rows = (-1, MOST_ROWS)
    shots = (-1, _MOST_SHOTS)
    return _loaded(os.fspath(path), rows, shots, ("scale", "amax", "loss"))


def _loaded(where: str, rows: Part, shots: Part, columns: Sequence[str]) -> Recording:
    _check_head(where)
    try:
        with _opened(where) as file:
            _check_schema(where, file)
            return _contents(where, file, rows, shots, columns)
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
    except BaseException:  # damage shows as a UnicodeDecodeError, too
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


def _contents(
    where: str,
    file: sqlite3.Connection,
    rows: Part,
    shots: Part,
    columns: Sequence[str],
) -> Recording:
    meta = _meta(where, file)
    tensors = _tensors(where, file)
    after = _before_the_last(file, "steps", rows)
    found = read_rows(where, file, after, tensors, _max_log2(meta), columns)
    counted = len(found), found.applied.count(0)
    return Recording(
        path=where,
        meta=meta,
        rows=found,
        shots=_shots(where, file, shots, tensors),
        counted=counted if len(found) < rows[1] else _counted(file, rows[0]),
    )


def _max_log2(meta: dict[str, Any]) -> float:
    chosen = FORMATS.get(str(meta.get("format")))
    return FP16_MAX_LOG2 if chosen is None else chosen.max_log2


def _meta(where: str, file: sqlite3.Connection) -> dict[str, Any]:
    found = {}
    for key, value in file.execute("SELECT key, value FROM meta LIMIT 10000"):
        if type(key) is not str or type(value) is not str:
            raise odd_entry(where, "meta", key)
        try:
            found[key] = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise odd_entry(where, "meta", key) from error
    return found


def _tensors(where: str, file: sqlite3.Connection) -> Tensors:
    found: Tensors = {}
    for number, name, size, kind in file.execute("SELECT * FROM tensors LIMIT 1000000"):
        if type(name) is not str or type(size) is not int:
            raise odd_entry(where, "tensors", number)
        if kind not in ("weight", "activation"):
            raise odd_entry(where, "tensors", number)
        found[number] = (name, size, kind)
    return found


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
            raise odd_entry(where, "histograms", step)
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
