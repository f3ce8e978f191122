"""Turn a recorded run into a `Trace` that policies can be replayed over.

A run in half precision does not show how large a gradient was that overflowed, only
that it was too large for that step's scale.  Such a step is taken to overflow there
just so, by half a binade; one that no scale could have saved overflows always.  Where
the largest gradient was not measured, it is taken to be what it was last.
"""

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable
from itertools import compress, count, pairwise
from operator import ne

from buoy._core.errors import TraceError
from buoy._core.formats import FORMATS
from buoy._core.replay.trace import Histogram, Trace
from buoy._core.verdicts import VERDICTS, Verdict
from buoy.trace.columns import Rows, columns_of
from buoy.trace.counts import Counts, Kind, Shot
from buoy.trace.recording import Recording

__all__ = ["replayable", "total"]

_JUST_SO = 0.5  # binades above the limit


def replayable(recording: Recording) -> Trace:
    """Make a trace for `buoy.replay` and `buoy.tune` of a recorded run."""
    rows = columns_of(recording.rows)
    if not rows:
        message = (
            f"The trace {recording.path!r} holds no step yet. Wait for the first step "
            "of the run."
        )
        raise TraceError(message)
    losses = _losses(rows)
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


def _sizes(rows: Rows, recording: Recording) -> "array[float]":
    logs = _logs(rows.amax)
    for step in rows.skipped:
        logs[step] = math.nan
    made = _filled(logs)
    if made is None:
        message = (
            f"The trace {recording.path!r} cannot be replayed: the size of the "
            "gradients was measured in none of its applied steps."
        )
        raise TraceError(message)
    lost = [(step, made[step]) for step in rows.skipped]
    moves = compress(count(1), map(ne, rows.scale, rows.scale[1:]))
    for start, end in pairwise([0, *moves, len(rows)]):
        limit = recording.max_log2 - _finite_log2(rows.scale[start])
        if max(made[start:end]) > limit:
            made[start:end] = array("d", [min(x, limit) for x in made[start:end]])
    for step, size in lost:
        if VERDICTS[rows.verdicts.get(step, Verdict.APPLIED)].grave:
            made[step] = math.inf
        else:
            limit = recording.max_log2 - _finite_log2(rows.scale[step])
            made[step] = max(size, limit + _JUST_SO)
    return made


def _losses(rows: Rows) -> "array[float] | None":
    """Return log2 of the losses, inf where the forward pass failed."""
    made = _filled(_logs(rows.loss))
    if made is not None:
        for step in rows.skipped:
            if rows.verdicts.get(step) == Verdict.FORWARD_NONFINITE:
                made[step] = math.inf
    return made


def _finite_log2(scale: float) -> float:
    return math.log2(scale) if 0.0 < scale < math.inf else 0.0


def _log2(value: float) -> float:
    """Return log2 of the magnitude; NaN if it was not measured."""
    size = abs(value)
    if 0.0 < size < math.inf:
        return math.log2(size)
    return -math.inf if size == 0.0 else size


def _logs(values: Iterable[float]) -> "array[float]":
    try:
        return array("d", map(math.log2, map(abs, values)))
    except ValueError:  # some are 0
        return array("d", map(_log2, values))


def _filled(made: "array[float]") -> "array[float] | None":
    """Carry the last known value on, and the first known one back; NaN is unknown."""
    if not math.isnan(sum(made)):
        return made
    unknown = list(compress(count(), map(math.isnan, made)))
    if len(unknown) == len(made):
        return None
    if unknown and unknown[0] == 0:
        made[0] = next(value for value in made if not math.isnan(value))
    for step in unknown:
        made[step] = made[max(step - 1, 0)]
    return made


def _histograms(rows: Rows, shots: Iterable[Shot], kind: Kind) -> list[Histogram]:
    made = []
    for shot in shots:
        seen = total(shot.tensors.values(), kind)
        place = bisect_left(rows.step, shot.step)
        there = place < len(rows) and rows.step[place] == shot.step
        if there and sum(seen.values()) > 0 and shot.scale > 0:
            shift = round(math.log2(shot.scale))
            low = min(seen)
            high = max(seen)
            counts = tuple(seen.get(i, 0.0) for i in range(low, high + 1))
            made.append(Histogram(place, low - shift, counts))
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
