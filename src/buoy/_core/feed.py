"""Record a step's row; the bins of exponent histograms."""

from collections.abc import Sequence
from typing import Protocol

from buoy._core.step import Row
from buoy._core.verdicts import Verdict

__all__ = ["BINS", "Records", "feed"]

BINS = 256  # of float32's exponent field; 0: zeros, 255: inf and NaN, e: 2^(e - 127)


class Records(Protocol):
    """The part of `buoy.trace.Recorder` that front ends use."""

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
        """Record one step."""


def feed(recorder: Records, row: Row, time: float | None = None) -> None:
    """Record a row; `time` is in seconds since 1970, now if it is not given.

    Example:
        >>> import tempfile, buoy.trace
        >>> folder = tempfile.TemporaryDirectory()
        >>> with buoy.trace.Recorder(folder.name + "/run.buoy") as recorder:
        ...     feed(recorder, Row(0, 8.0, applied=True, loss=0.5))
        >>> [row.loss for row in buoy.trace.load(recorder.path).rows]
        [0.5]
        >>> folder.cleanup()
    """
    recorder.step(
        step=row.step,
        time=time,
        scale=row.scale,
        applied=row.applied,
        verdict=row.verdict,
        norm=row.norm,
        amax=row.amax,
        loss=row.loss,
        offenders=row.offenders,
    )
