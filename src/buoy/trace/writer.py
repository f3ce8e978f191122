"""The thread that writes: errors here never stop training.

Items wait in a bounded queue; what does not fit is counted and let go.  A disk that is
full, slow or read-only costs the trace, a sink that fails costs the sink, and each is
reported once, by the thread that trains.
"""

import contextlib
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from buoy._core.errors import BuoyError
from buoy._core.step import Row
from buoy.trace.counts import Counts, Shot
from buoy.trace.outlet import PATIENCE, Outlet, Sink
from buoy.trace.store import Store

__all__ = ["Batch", "Tensors", "Writer"]

_PAUSE = 0.2  # seconds between two commits: what a `kill -9` may cost
_MOST_SHOTS = 64

Tensors = Mapping[str, Counts] | Callable[[], Mapping[str, Counts]]


@dataclass(slots=True)
class Batch:
    """What is waiting to be written."""

    rows: list[Row] = field(default_factory=list)
    shots: list[Shot] = field(default_factory=list)
    offenders: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.rows or self.shots or self.offenders or self.meta)


class Writer:
    """Take items from the training thread, and write them in another."""

    def __init__(
        self, path: Path | None, sinks: Sequence[Sink], *, most: int, budget: int
    ) -> None:
        self.path = path
        self.lost = 0
        self.news: deque[str] = deque()  # warnings to issue, once each
        self.rows: deque[Row] = deque()
        self.shots: deque[tuple[int, float, Tensors]] = deque()
        self.offenders: deque[tuple[int, tuple[str, ...]]] = deque(maxlen=most)
        self.meta: deque[dict[str, Any]] = deque(maxlen=most)
        self._most = most
        self._budget = budget
        self._outlets = [Outlet(sink, most=most, news=self.news) for sink in sinks]
        self._store: Store | None = None
        self._broken = path is None
        self._wake = threading.Event()
        self._done = False
        self._flushed: deque[threading.Event] = deque()
        self._process = os.getpid()
        self._thread = threading.Thread(
            target=self._work, name="buoy-trace", daemon=True
        )
        self._thread.start()

    def put(self, row: Row) -> None:
        """Take a row, or count it as lost if too many are waiting."""
        waiting = len(self.rows)
        if waiting >= self._most:
            self.lost += 1
            return
        self.rows.append(row)
        if 2 * waiting >= self._most:
            self._wake.set()

    def put_shot(self, step: int, scale: float, tensors: Tensors) -> None:
        """Take histograms, unless too many are waiting."""
        if len(self.shots) < _MOST_SHOTS:
            self.shots.append((step, scale, tensors))

    def flush(self) -> None:
        """Wait until what was put so far is written, unless the disk hangs."""
        if self._process != os.getpid():
            return
        done = threading.Event()
        self._flushed.append(done)
        self._wake.set()
        if self._thread.is_alive():
            done.wait(PATIENCE)
        for outlet in self._outlets:
            outlet.flush()

    def close(self) -> None:
        """Write what is waiting, and end; a second time does nothing."""
        if self._done or self._process != os.getpid():
            return
        self._done = True
        self._wake.set()
        if self._thread is threading.current_thread():
            return  # a recorder that was collected here: the thread goes on to its end
        self._thread.join(PATIENCE)
        if self._thread.is_alive():
            self.news.append("the disk is too slow: not everything is written")
        for outlet in self._outlets:
            outlet.finish()
        for outlet in self._outlets:
            outlet.join()

    # -- in the thread --------------------------------------------------------------

    def _work(self) -> None:
        try:
            self._write_on()
        finally:
            for outlet in self._outlets:
                outlet.finish()

    def _write_on(self) -> None:
        held = Batch()
        counted = 0
        while True:
            done = self._done
            waiting = [self._flushed.popleft() for _ in range(len(self._flushed))]
            self._take(held)
            if self.lost != counted:
                counted = held.meta["lost"] = self.lost
            if held and self._written(held):
                held = Batch()
            for event in waiting:
                event.set()
            if done:
                break
            self._wake.wait(_PAUSE)
            self._wake.clear()
        if self._store is not None and not self._broken:
            self._stored(Batch(meta={"ended": time.time()}))
            with contextlib.suppress(sqlite3.Error, OSError):
                self._store.close()

    def _take(self, held: Batch) -> None:
        """Add what has come to what could not be written yet, within bounds."""
        while self.rows and len(held.rows) < self._most:
            held.rows.append(self.rows.popleft())
        while self.shots:
            step, scale, tensors = self.shots.popleft()
            if len(held.shots) < _MOST_SHOTS:
                try:
                    made = tensors() if callable(tensors) else tensors
                    held.shots.append(Shot(step, scale, made))
                except BaseException as error:  # noqa: BLE001 - a front end's function
                    self.news.append(f"no histograms of step {step}: {_named(error)}")
        while self.offenders:
            held.offenders.append(self.offenders.popleft())
        while self.meta:
            held.meta.update(self.meta.popleft())

    def _written(self, held: Batch) -> bool:
        """Write to the file and the sinks; say no if it must be tried again."""
        if not self._broken and not self._stored(held):
            return False
        if held.rows:
            for outlet in self._outlets:
                outlet.put(held.rows)
        return True

    def _stored(self, held: Batch) -> bool:
        try:
            if self._store is None and self.path is not None:
                self._store = Store(self.path, self._budget)
                self.path = self._store.path
            if self._store is not None:
                self._store.write(held.rows, held.shots, held.offenders, held.meta)
        except BaseException as error:  # noqa: BLE001 - any error costs only the trace
            busy = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
            if busy and not self._done:
                return False  # another process has the file open: later
            self._give_up(error)
        return True

    def _give_up(self, error: BaseException) -> None:
        self._broken = True
        self.news.append(
            f"recording to {str(self.path)!r} has stopped: {_named(error)}. Training "
            "continues without it; what was written so far can be read"
        )
        if self._store is not None:
            with contextlib.suppress(sqlite3.Error):
                self._store.close()


def _named(error: BaseException) -> str:
    """Describe an error, with its type if its text alone is unclear."""
    plain = isinstance(error, (sqlite3.Error, OSError, BuoyError))
    return str(error) if plain else f"{type(error).__name__}: {error}"
