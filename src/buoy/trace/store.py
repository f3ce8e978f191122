"""The file that a run is recorded in: SQLite, written by one thread.

Rows are committed as they come, so a run that is killed leaves everything but its last
moments behind, and others read while it goes on.
"""

import contextlib
import json
import logging
import math
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from operator import index
from pathlib import Path
from typing import Any

from buoy._core.errors import TraceError
from buoy._core.step import Row
from buoy.trace.counts import Kind, Shot, pack
from buoy.trace.schema import APPLICATION, TABLES, VERSION

__all__ = ["Store"]

log = logging.getLogger("buoy.trace")

_MOST_OFFENDERS = 16  # of one step; an overflow that hits all hits these too
_INSERT = "INSERT OR REPLACE INTO steps VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"


class Store:
    """One run's file, open for writing.

    Histograms may take `budget` bytes: beyond it every second of the older ones goes.
    """

    def __init__(self, path: Path, budget: int) -> None:
        self._budget = budget
        self._tensors: dict[tuple[str, Kind], int] = {}
        self.path = _created(path)
        # Several threads may touch it, one after the other: writer, then `close`.
        self._file = sqlite3.connect(self.path, timeout=5.0, check_same_thread=False)
        self._file.isolation_level = None
        try:
            self._begin()
        except BaseException:
            self._file.close()
            self.path.unlink(missing_ok=True)  # nothing is in it yet
            raise
        self._same = self.path.stat()
        if self.path != path:
            log.warning("%s exists; this run is recorded in %s", path, self.path)

    def _begin(self) -> None:
        """Create all tables in one transaction: readers see none of them or all."""
        with self._transaction():
            self._file.execute(f"PRAGMA application_id = {APPLICATION}")
            self._file.execute(f"PRAGMA user_version = {VERSION}")
            for statement in TABLES.values():
                self._file.execute(statement)
        self._file.execute("PRAGMA journal_mode = WAL")
        self._file.execute("PRAGMA synchronous = NORMAL")

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._file.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._file.execute("ROLLBACK")
            raise
        self._file.execute("COMMIT")

    def write(
        self,
        rows: Sequence[Row],
        shots: Sequence[Shot] = (),
        offenders: Iterable[tuple[int, tuple[str, ...]]] = (),
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a batch, whole or not at all."""
        self._check_there()
        with self._transaction():
            self._file.executemany(_INSERT, map(_values, rows))
            for shot in shots:
                self._add_shot(shot)
            self._accuse((row.step, row.offenders) for row in rows if row.offenders)
            self._accuse(offenders)
            self._file.executemany(
                "INSERT OR REPLACE INTO meta VALUES (?, ?)",
                [(str(key), _json(value)) for key, value in (meta or {}).items()],
            )
            if shots:
                self._thin()

    def _check_there(self) -> None:
        """Raise if the file was deleted or replaced: SQLite would not notice."""
        try:
            there = os.path.samestat(self._same, self.path.stat())
        except FileNotFoundError:
            there = False
        if not there:
            raise TraceError("the file was deleted, moved or replaced")

    def _add_shot(self, shot: Shot) -> None:
        numbers = {
            self._number(name, seen.size, seen.kind): seen
            for name, seen in shot.tensors.items()
        }
        self._file.execute(
            "INSERT OR REPLACE INTO histograms VALUES (?, ?, ?)",
            (shot.step, shot.scale, pack(numbers)),
        )

    def _accuse(self, offenders: Iterable[tuple[int, tuple[str, ...]]]) -> None:
        for step, names in offenders:
            self._file.executemany(
                "INSERT OR REPLACE INTO offenders VALUES (?, ?)",
                [(step, self._number(name)) for name in names[:_MOST_OFFENDERS]],
            )

    def _number(self, name: str, size: int = 0, kind: Kind = "weight") -> int:
        number = self._tensors.get((name, kind))
        if number is None:
            number = self._tensors[name, kind] = len(self._tensors)
            self._file.execute(
                "INSERT INTO tensors VALUES (?, ?, ?, ?)", (number, name, size, kind)
            )
        elif size:
            self._file.execute(
                "UPDATE tensors SET size = ? WHERE tensor = ? AND size <> ?",
                (size, number, size),
            )
        return number

    def _thin(self) -> None:
        """Let every second histogram of the older three quarters go, if need be."""
        sizes = self._file.execute(
            "SELECT step, length(packed) FROM histograms ORDER BY step"
        ).fetchall()
        while len(sizes) > 4 and sum(size for _, size in sizes) > self._budget:
            old = 1 + 3 * len(sizes) // 4  # the first one of all stays
            gone = [(step,) for step, _ in sizes[1:old:2]]
            self._file.executemany("DELETE FROM histograms WHERE step = ?", gone)
            lost = {step for (step,) in gone}
            sizes = [pair for pair in sizes if pair[0] not in lost]

    def close(self) -> None:
        """Leave one plain file, also while others read it."""
        try:
            with contextlib.suppress(sqlite3.OperationalError):  # a reader is there
                self._file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                self._file.execute("PRAGMA journal_mode = DELETE")
        finally:
            self._file.close()


def _created(path: Path) -> Path:
    """Create an empty file of this name, or with the next free number: `run-2.buoy`.

    Exclusively: of several runs that start at the same time, each gets its own.
    """
    if path.is_dir():
        message = f"{str(path)!r} is a folder; name a file in it"
        raise TraceError(message)
    for number in count(1):
        name = path.name if number == 1 else f"{path.stem}-{number}{path.suffix}"
        found = path.with_name(name)
        with contextlib.suppress(FileExistsError):
            found.open("xb").close()
            break
    # SQLite would take the log of a file that is gone for this one's.
    for ending in ("-wal", "-shm"):
        found.with_name(found.name + ending).unlink(missing_ok=True)
    return found


def _values(row: Row) -> tuple[int | float | str | None, ...]:
    return (
        index(row.step),
        float(row.time),
        float(row.scale),
        int(row.applied),
        None if row.applied else row.verdict.value,
        _number(row.norm),
        _number(row.amax),
        _number(row.headroom),
        _number(row.loss),
    )


def _number(value: float | None) -> float | str | None:
    """SQLite turns NaN into NULL, which means that nothing was measured."""
    if value is None:
        return None
    return "nan" if math.isnan(value) else float(value)


def _json(value: object) -> str:
    """Write what is noted about a run; what JSON cannot hold becomes text."""
    try:
        return json.dumps(value, default=str)
    except (TypeError, ValueError, RecursionError):  # odd keys, a circle, a `__str__`
        return json.dumps(f"{value!r:.300}")
