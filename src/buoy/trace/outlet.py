"""A sink in its own thread: if it hangs or fails, only its output is lost."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from buoy._core.step import Row

__all__ = ["PATIENCE", "Outlet", "Sink"]

PATIENCE = 10.0  # seconds that closing waits for a call that does nothing
_MOST = 60.0  # and for one that computes: dashboards take long to start
_LOOK = 0.25  # seconds between two looks at what a call does


class Sink(Protocol):
    """An object that takes rows as they are recorded; it may be slow or fail."""

    def write(self, rows: Sequence[Row]) -> None:
        """Take the next rows."""

    def close(self) -> None:
        """Finish."""


class Outlet:
    """Pass rows on to a sink; `news` gets a sentence about what was lost."""

    def __init__(self, sink: Sink, *, most: int, news: deque[str]) -> None:
        self.name = type(sink).__name__
        self._sink = sink
        self._most = most
        self._news = news
        self._rows: deque[Row] = deque()
        self._lost = 0
        self._off = self._done = False
        self._wake = threading.Event()
        self._flushed: deque[threading.Event] = deque()
        self._since: float | None = None  # when the call that now runs began
        self._moved = 0.0  # when the thread was last seen to compute
        self._used = 0  # what it had computed then, in ticks
        self.thread = threading.Thread(
            target=self._work, name=f"buoy-{self.name}", daemon=True
        )
        self.thread.start()

    def put(self, rows: Sequence[Row]) -> None:
        """Take rows, as many as may wait; the rest is counted."""
        if self._off:
            return
        fitting = rows[: max(self._most - len(self._rows), 0)]
        self._lost += len(rows) - len(fitting)
        self._rows.extend(fitting)
        self._wake.set()

    def finish(self) -> None:
        """Have the sink closed once it has taken everything."""
        self._done = True
        self._wake.set()

    def flush(self) -> None:
        """Wait until the sink has taken what was put so far."""
        done = threading.Event()
        self._flushed.append(done)
        self._wake.set()
        self._wait(lambda: done.wait(_LOOK) or not self.thread.is_alive())

    def join(self) -> None:
        """Wait until the sink is closed, unless one of its calls hangs."""
        if self.thread is threading.current_thread():
            return
        self._wait(self._ended)
        if self.thread.is_alive():
            self._news.append(
                f"the sink {self.name} does not return: it was not closed, and may "
                "lack the last rows"
            )

    def _ended(self) -> bool:
        self.thread.join(_LOOK)
        return not self.thread.is_alive()

    def _wait(self, ended: Callable[[], bool]) -> None:
        """Wait for it as long as the call that runs returns or computes."""
        while not ended():
            now = time.monotonic()
            since = self._since
            used = self._cpu_time()
            if since is None or used is None or used > self._used:
                self._used = used or 0
                self._moved = now
            idle = now - max(self._moved, since or now)
            if idle > PATIENCE or now - (since or now) > _MOST:
                return

    def _cpu_time(self) -> int | None:
        """Return what the thread has computed, in ticks; None where that is unknown.

        Not by `time.pthread_getcpuclockid`: the thread may end at this very moment.
        """
        try:
            task = Path(f"/proc/self/task/{self.thread.native_id}/stat").read_text()
        except OSError:  # pragma: no cover - needs a system without /proc
            return None
        user, system = task.rpartition(")")[2].split()[11:13]
        return int(user) + int(system)

    # -- in the thread --------------------------------------------------------------

    def _work(self) -> None:
        while not self._off:
            done = self._done
            waiting = [self._flushed.popleft() for _ in range(len(self._flushed))]
            rows = [self._rows.popleft() for _ in range(len(self._rows))]
            if rows:
                self._call(partial(self._sink.write, rows))
            for event in waiting:
                event.set()
            if done:
                break
            self._wake.wait()
            self._wake.clear()
        if not self._off:
            self._call(self._sink.close)
        if self._lost:
            self._news.append(
                f"the sink {self.name} was too slow: {self._lost} rows did not reach it"
            )
        for event in self._flushed:
            event.set()

    def _call(self, call: Callable[[], None]) -> None:
        self._since = time.monotonic()
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - SystemExit is one too
            self._off = True
            self._rows.clear()
            self._news.append(
                f"the sink {self.name} has failed and is switched off: "
                f"{type(error).__name__}: {error}"
            )
        finally:
            self._since = None
