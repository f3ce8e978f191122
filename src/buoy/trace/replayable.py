"""Turn a recorded run into a `Trace` that policies can be replayed over.

A run in half precision does not show how large a gradient was that overflowed, only
that it was too large for that step's scale.  Such a step is taken to overflow there
just so, by half a binade; one that no scale could have saved overflows always.  Where
the largest gradient was not measured, it is taken to be what it was last.
"""

import math
from collections.abc import Iterable, Sequence

from buoy._core.errors import TraceError
from buoy._core.formats import FORMATS
from buoy._core.replay.trace import Histogram, Trace
from buoy._core.verdicts import VERDICTS
from buoy.trace.counts import Counts, Kind
from buoy.trace.recording import Recording, Shot
from buoy.trace.row import Row

__all__ = ["replayable", "total"]

_JUST_SO = 0.5  # binades above the limit


def replayable(recording: Recording) -> Trace:
    """Make a trace for `buoy.replay` and `buoy.tune` of a recorded run."""
    rows = recording.rows
    if not rows:
        message = (
            f"The trace {recording.path!r} holds no step yet. Wait for the run's first."
        )
        raise TraceError(message)
    losses = _filled([_log2(row.loss) for row in rows])
    limits = FORMATS.get(str(recording.meta.get("format")), FORMATS["fp16"])
    return Trace(
        amax_log2=_sizes(rows, recording),
        loss_log2=losses,
        weight_histograms=_histograms(rows, recording.shots, "weight"),
        activation_histograms=_histograms(rows, recording.shots, "activation"),
        max_log2=limits.max_log2,
        zero_log2=math.log2(limits.smallest_subnormal) - 1.0,
        name=recording.name,
    )


def _sizes(rows: Sequence[Row], recording: Recording) -> list[float]:
    sizes = _filled([_log2(row.amax) if row.applied else None for row in rows])
    if sizes is None:
        message = (
            f"The trace {recording.path!r} cannot be replayed: the size of the "
            "gradients was measured in none of its applied steps."
        )
        raise TraceError(message)
    made = []
    for row, size in zip(rows, sizes, strict=True):
        limit = recording.max_log2 - _finite_log2(row.scale)
        if row.applied:
            made.append(min(size, limit))
        elif VERDICTS[row.verdict].grave:
            made.append(math.inf)
        else:
            made.append(max(size, limit + _JUST_SO))
    return made


def _finite_log2(scale: float) -> float:
    return math.log2(scale) if 0.0 < scale < math.inf else 0.0


def _log2(value: float | None) -> float | None:
    if value is None or math.isnan(value):
        return None
    size = abs(value)
    if size == math.inf:
        return math.inf
    return math.log2(size) if size > 0.0 else -math.inf


def _filled(values: Sequence[float | None]) -> list[float] | None:
    """Carry the last known value on, and the first known one back."""
    last = next((value for value in values if value is not None), None)
    if last is None:
        return None
    made = []
    for value in values:
        last = last if value is None else value
        made.append(last)
    return made


def _histograms(
    rows: Sequence[Row], shots: Iterable[Shot], kind: Kind
) -> list[Histogram]:
    place = {row.step: index for index, row in enumerate(rows)}
    made = []
    for shot in shots:
        seen = total(shot.tensors.values(), kind)
        if shot.step in place and sum(seen.values()) > 0 and shot.scale > 0:
            shift = round(math.log2(shot.scale))
            low, high = min(seen), max(seen)
            counts = tuple(seen.get(i, 0.0) for i in range(low, high + 1))
            made.append(Histogram(place[shot.step], low - shift, counts))
    return made


def total(tensors: Iterable[Counts], kind: Kind = "weight") -> dict[int, float]:
    """Add tensors up by binade, each counting as many elements as it has.

    Example:
        >>> total([Counts(low=-3, counts=(1, 1), size=20)])
        {-3: 10.0, -2: 10.0}
    """
    sums: dict[int, float] = {}
    for seen in tensors:
        looked_at = seen.looked_at
        if seen.kind == kind and looked_at:
            weight = max(seen.size, looked_at) / looked_at
            for i, count in enumerate(seen.counts, seen.low):
                if count:
                    sums[i] = sums.get(i, 0.0) + weight * count
    return sums
