"""Record a run, step by step, without slowing it down.

    recorder.step(...)  -->  queue  -->  thread  -->  run.buoy (SQLite), sinks

Front ends feed it; so can anybody's own loop.
"""

import os
import platform
import time as clock
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from buoy._core.errors import OptionError
from buoy._core.formats import number_format
from buoy._core.step import Row
from buoy._core.verdicts import Verdict
from buoy._version import __version__
from buoy.trace.outlet import Sink
from buoy.trace.writer import Tensors, Writer

__all__ = ["EVERY", "Recorder", "TraceWarning"]

EVERY = 100  # steps between two sets of histograms


class TraceWarning(UserWarning):
    """A part of a recording was lost; training is not affected."""


class Recorder:
    """Write a run's steps and histograms to a file, in a background thread.

    `step` takes a microsecond or two and never waits for the disk.  If writing fails,
    there is one `TraceWarning`, and training continues.

    Args:
        path: the file, one per run; if `run.buoy` exists, the run is recorded in
            `run-2.buoy`, and so on.  None records to the sinks only.
        every: steps between two sets of histograms; 0 for none.
        sinks: further outputs of the rows (see `buoy.trace.sinks`).
        meta: facts about the run; what JSON cannot hold is stored as text.
        format: the number format that gradients are computed in.
        budget: the bytes that histograms may take; older ones are thinned out.
        queue: rows that may wait for a slow disk or sink; further rows are lost.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> with Recorder(folder.name + "/run.buoy") as recorder:
        ...     recorder.step(scale=65536.0, applied=True, amax=0.5, loss=1.0)
        ...     recorder.step(scale=65536.0, applied=False, offenders=["head.weight"])
        >>> import buoy.trace
        >>> [row.applied for row in buoy.trace.load(recorder.path).rows]
        [True, False]
        >>> folder.cleanup()
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        *,
        every: int = EVERY,
        sinks: Sequence[Sink] = (),
        meta: Mapping[str, Any] | None = None,
        format: str = "fp16",  # noqa: A002 - our word for it
        budget: int = 2**23,
        queue: int = 2**16,
    ) -> None:
        self.every = every
        self._max_log2 = number_format(format).max_log2
        self._next = 0
        self._drains: list[Callable[[], None]] = []
        self._writer = Writer(
            None if path is None else Path(path), sinks, most=queue, budget=budget
        )
        self._close = weakref.finalize(self, _finish, self._writer)
        about = {"format": number_format(format).name, "started": clock.time()}
        own = {str(key): value for key, value in (meta or {}).items()}
        self.describe(**{**_versions(), **own, **about})

    @property
    def path(self) -> Path | None:
        """The file; final once something has been written."""
        return self._writer.path

    @property
    def lost(self) -> int:
        """The number of rows that did not fit into the queue."""
        return self._writer.lost

    def describe(self, **meta: Any) -> None:
        """Add facts about the run, e.g. `model="gpt"`; later values replace earlier."""
        self._writer.meta.append(meta)

    def due(self, step: int) -> bool:
        """Return whether to record the histograms of this step."""
        return self.every > 0 and step % self.every == 0

    def step(
        self,
        *,
        scale: float,
        applied: bool,
        step: int | None = None,
        verdict: Verdict | str | None = None,
        norm: float | None = None,
        amax: float | None = None,
        loss: float | None = None,
        offenders: Sequence[str] = (),
        time: float | None = None,
    ) -> None:
        """Record one step: plain numbers, of unscaled gradients but for the scale."""
        number = self._next if step is None else step
        self._next = number + 1
        if applied:
            verdict = Verdict.APPLIED
        elif verdict is None or verdict == Verdict.APPLIED:
            verdict = Verdict.SCALE_TOO_HIGH
        self._writer.put(
            Row(
                step=number,
                scale=scale,
                applied=applied,
                verdict=_verdict(verdict),
                norm=norm,
                amax=amax,
                loss=loss,
                offenders=tuple(offenders),
                time=clock.time() if time is None else time,
                max_log2=self._max_log2,
            )
        )
        if self._writer.news:
            self._tell()

    def histograms(self, step: int, scale: float, tensors: Tensors) -> None:
        """Record the sizes of each tensor's *scaled* gradients at a step.

        `tensors` maps names to `Counts`, or is a function that returns such a map;
        the writing thread calls it.
        """
        self._writer.put_shot(step, scale, tensors)

    def offenders(self, step: int, names: Sequence[str]) -> None:
        """Add the offenders of a step that is already recorded."""
        self._writer.offenders.append((step, tuple(names)))

    def attach(self, drain: Callable[[], None]) -> None:
        """Call a front end for its pending rows, at `flush` and `close`."""
        self._drains.append(drain)

    def complain(self, message: str) -> None:
        """Queue a warning, issued once by the training thread."""
        self._writer.news.append(message)

    def flush(self) -> None:
        """Wait until everything so far can be read by others."""
        self._drain()
        self._writer.flush()
        self._tell()

    def close(self) -> None:
        """Write the rest and leave one plain file; a second time does nothing."""
        try:
            if self._close.alive:
                self._drain()
        finally:
            self._close()  # and tells what was lost

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _drain(self) -> None:
        for drain in self._drains:
            drain()

    def _tell(self) -> None:
        _tell(self._writer)


def _verdict(verdict: Verdict | str) -> Verdict:
    try:
        return Verdict(verdict)
    except ValueError as error:
        known = ", ".join(sorted(Verdict))
        message = f"`verdict` must be one of {known}, got {verdict!r}."
        raise OptionError(message) from error


def _finish(writer: Writer) -> None:
    """Close; a script that just ends hears what was lost, too."""
    writer.close()
    _tell(writer)


def _tell(writer: Writer) -> None:
    while writer.news:
        message = f"Buoy's trace: {writer.news.popleft()}."
        warnings.warn(message, TraceWarning, stacklevel=4)


def _versions() -> dict[str, str]:
    return {"buoy": __version__, "python": platform.python_version()}
