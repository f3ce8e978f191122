"""The figures of a recorded run, as plain numbers: what the page and the watch show."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import compress, filterfalse
from operator import sub
from typing import TYPE_CHECKING, Any

from buoy._core.clipped import find_threshold
from buoy._core.formats import FORMATS, Format
from buoy._core.step import Row
from buoy._core.verdicts import Verdict
from buoy._core.watch import PATIENCE, is_idle, window_of
from buoy.trace.columns import Rows, columns_of
from buoy.trace.counts import Counts, Shot
from buoy.trace.recording import Recording

if TYPE_CHECKING:
    import numpy.typing as npt

    Numbers = list[float] | npt.NDArray[Any]

__all__ = [
    "Clipped",
    "Facts",
    "Layer",
    "Shares",
    "format_of",
    "is_finite",
    "layers",
    "share_points",
    "shares",
    "sum_up",
]

_WARM_UP = 0.1  # of the run, when skips are expected
_MOST_WARM_UP = 1000  # steps, of a long run
_LOOKED_AT = 2**14  # steps, evenly spaced, among which a threshold is looked for


@dataclass(frozen=True, slots=True)
class Shares:
    """Where the gradients of one step lay, as shares of all elements."""

    zero: float  # exactly zero, by underflow or by nature
    subnormal: float  # not zero, but below the smallest normal number: digits are lost
    nonfinite: float


@dataclass(frozen=True, slots=True)
class Layer:
    """One tensor over the whole run."""

    name: str
    size: int  # elements; 0 if it was never measured, only named by a skip
    zero: float  # share, mean over the looks
    subnormal: float
    headroom: float | None  # bits, the least of all looks
    offences: int  # skipped steps in which it was not finite


@dataclass(frozen=True, slots=True)
class Clipped:
    """Gradients that were clipped while they were multiplied by the scale."""

    step: int | None  # in which it was noticed, if it was while the run went on
    scale: float
    certain: bool = True


@dataclass(frozen=True, slots=True)
class Facts:
    """One run in figures."""

    steps: int
    skipped: int
    warm_up_skips: int  # among them, in the first tenth
    row: int  # skipped in a row at the end
    recent: int  # steps: the last ones, of which
    recent_skips: int  # so many were skipped
    zeros: int  # applied at the end without effect: see `is_idle`
    verdicts: dict[Verdict, int]
    first_scale: float
    last_scale: float
    low_scale: float
    high_scale: float
    headroom: float | None  # bits, median
    least_headroom: float | None
    last_loss: float | None
    seconds: float  # per step, median
    shares: Shares | None  # of the latest look at all gradients
    layers: tuple[Layer, ...]  # worst first
    offenders: tuple[tuple[str, int], ...]  # how often, most often first
    lost: int
    ended: bool
    clipped: Clipped | None  # while they were scaled

    @property
    def idle(self) -> bool:
        """Whether the last steps learned nothing although they were applied."""
        return self.zeros >= PATIENCE

    @property
    def skipped_share(self) -> float:
        """Share of the steps that were skipped."""
        return self.skipped / self.steps if self.steps else 0.0


def sum_up(recording: Recording) -> Facts:
    """Compute the figures of a run.

    Example:
        >>> from buoy.trace import Recording, Row
        >>> rows = [Row(i, 2.0**16, i > 0, amax=0.25, time=i) for i in range(4)]
        >>> found = sum_up(Recording("run.buoy", rows=rows))
        >>> found.steps, found.skipped, round(found.headroom, 2)
        (4, 1, 2.0)
    """
    rows = columns_of(recording.rows)
    missed = [rows[place] for place in rows.skipped]
    warm_up = min(int(_WARM_UP * len(rows)), _MOST_WARM_UP)
    warm_until = rows[warm_up].step if rows else 0
    bits = _known(rows)
    scales = rows.scale or [math.nan]
    blamed = Counter(name for row in missed for name in row.offenders)
    recent = rows[-window_of() :]
    return Facts(
        steps=len(rows),
        skipped=len(missed),
        warm_up_skips=sum(row.step < warm_until for row in missed),
        row=_row(rows),
        recent=len(recent),
        recent_skips=sum(not row.applied for row in recent),
        zeros=_zeros(rows),
        verdicts=dict(Counter(row.verdict for row in missed).most_common()),
        first_scale=scales[0],
        last_scale=scales[-1],
        low_scale=min(scales),
        high_scale=max(scales),
        headroom=_median(bits) if len(bits) else None,
        least_headroom=_least(bits) if len(bits) else None,
        last_loss=next((r.loss for r in reversed(rows) if r.loss is not None), None),
        seconds=_seconds(rows.time),
        shares=_latest(recording),
        layers=tuple(layers(recording)),
        offenders=tuple(blamed.most_common()),
        lost=recording.lost,
        ended=recording.ended,
        clipped=_clipped(recording, rows),
    )


def _clipped(recording: Recording, rows: Rows) -> Clipped | None:
    """Return what the front end noticed, or what the rows show."""
    noted = recording.meta.get("clipped_while_scaled")
    if isinstance(noted, dict) and isinstance(noted.get("scale"), (int, float)):
        step = noted.get("step")
        return Clipped(step if isinstance(step, int) else None, float(noted["scale"]))

    # The torch front end sees more than the rows do at a single scale.
    losses = {loss for loss in rows.loss if math.isfinite(loss)}
    one_scale = "torch" not in recording.meta and len(losses) > 1
    every = slice(None, None, 1 + len(rows) // _LOOKED_AT)
    for column in (rows.norm, rows.amax):
        sizes: list[float] = []
        scales: list[float] = []
        for size, scale, applied in zip(
            column[every], rows.scale[every], rows.applied[every], strict=True
        ):
            if applied and 0.0 < size < math.inf:
                sizes.append(size)
                scales.append(scale)
        found = find_threshold(sizes, scales, one_scale=one_scale)
        if found is not None:
            _, certain = found
            return Clipped(None, scales[-1], certain)
    return None


def _row(rows: Sequence[Row]) -> int:
    count = 0
    for row in reversed(rows):
        if row.applied:
            break
        count += 1
    return count


def _zeros(rows: Sequence[Row]) -> int:
    count = 0
    for row in reversed(rows):
        idle = is_idle(row.scale, row.norm, row.amax) if row.applied else None
        if idle is False:
            break
        count += bool(idle)
    return count


# -- over all rows: by NumPy, where it is installed ------------------------------------


def _seconds(times: Sequence[float]) -> float:
    """Return the median time between steps: pauses for validation do not count."""
    if len(times) < 2:
        return math.nan
    np = _numpy()
    gaps = np.diff(times) if np else list(map(sub, times[1:], times))
    return max(_median(gaps), 0.0)


def _median(values: "Numbers") -> float:
    """Return the median; NumPy finds it without sorting."""
    np = _numpy()
    return float(np.median(values)) if np else statistics.median(values)


def _least(values: "Numbers") -> float:
    np = _numpy()
    return float(np.min(values)) if np else min(values)


def _known(rows: Rows) -> "Numbers":
    """Return the headroom of the applied steps that have one."""
    np = _numpy()
    if not np:
        return list(filterfalse(math.isnan, compress(rows.headroom, rows.applied)))
    bits = np.asarray(rows.headroom)
    known: Numbers = bits[np.frombuffer(rows.applied, bool) & ~np.isnan(bits)]
    return known


def _has_zero(values: Sequence[float]) -> bool:
    np = _numpy()
    return bool((np.asarray(values) == 0.0).any()) if np else 0.0 in values


def _numpy() -> Any:
    """Return NumPy, where it is installed."""
    try:
        return import_module("numpy")
    except ImportError:
        return None


# -- histograms ------------------------------------------------------------------------


def format_of(recording: Recording) -> Format:
    """Return the number format of a run."""
    return FORMATS.get(str(recording.meta.get("format")), FORMATS["fp16"])


def share_points(recording: Recording) -> list[tuple[int, Shares]]:
    """Return where the gradients lay, step by step: what the chart draws.

    Known from every look at finite gradients, and from every step whose norm or largest
    gradient was exactly zero.  If no look found finite gradients, the first one counts.
    """
    limits = format_of(recording)
    looks = [
        (shot.step, found)
        for shot in recording.shots
        if (found := shares(shot.tensors.values(), limits)) is not None
    ]
    points = {step: found for step, found in looks if not found.nonfinite}
    rows = columns_of(recording.rows)
    if _has_zero(rows.norm) or _has_zero(rows.amax):
        for step, applied, norm, amax in zip(
            rows.step, rows.applied, rows.norm, rows.amax, strict=True
        ):
            if applied and (norm == 0.0 or amax == 0.0):
                points[step] = Shares(1.0, 0.0, 0.0)
    return sorted(points.items()) or looks[:1]


def _latest(recording: Recording) -> Shares | None:
    """Return the last point of the chart: the figures cannot disagree with it."""
    points = share_points(recording)
    return points[-1][1] if points else None


def shares(tensors: Iterable[Counts], limits: Format) -> Shares | None:
    """Put tensors together, each counting as many elements as it has.

    Example:
        >>> seen = Counts(low=-16, counts=(1, 1, 1, 1), zeros=4, size=8)
        >>> shares([seen], FORMATS["fp16"])
        Shares(zero=0.5, subnormal=0.25, nonfinite=0.0)
    """
    normal = math.log2(limits.smallest_normal)
    total = 0.0
    zero = 0.0
    subnormal = 0.0
    nonfinite = 0.0
    for seen in tensors:
        looked_at = seen.looked_at
        if not looked_at:
            continue
        size = max(seen.size, looked_at)
        total += size
        zero += size * seen.zero_share
        subnormal += size * seen.below(normal)
        nonfinite += size * seen.nonfinite / looked_at
    if not total:
        return None
    return Shares(zero / total, subnormal / total, nonfinite / total)


def layers(recording: Recording) -> list[Layer]:
    """Sum every tensor up over the run, those that lose most first."""
    named = columns_of(recording.rows).offenders.values()
    blamed = Counter(name for names in named for name in names)
    looks: dict[str, list[Counts]] = {}
    for shot in recording.shots:
        if not is_finite(shot):
            continue
        for name, seen in shot.tensors.items():
            if seen.looked_at:  # else it has no elements: nothing can be lost
                looks.setdefault(name, []).append(seen)
    limits = format_of(recording)
    found = [_layer(name, seen, limits, blamed[name]) for name, seen in looks.items()]
    unseen = [name for name in blamed if name not in looks]
    found += [Layer(name, 0, 0.0, 0.0, None, blamed[name]) for name in unseen]
    return sorted(found, key=lambda x: (-(x.zero + x.subnormal), -x.offences, x.name))


def is_finite(shot: Shot) -> bool:
    """Return whether every gradient of a look was finite."""
    return not any(seen.nonfinite for seen in shot.tensors.values())


def _layer(name: str, looks: list[Counts], limits: Format, offences: int) -> Layer:
    normal = math.log2(limits.smallest_normal)
    tops = [top for seen in looks if (top := seen.amax_log2) is not None]
    return Layer(
        name=name,
        size=looks[-1].size,
        zero=statistics.fmean(seen.zero_share for seen in looks),
        subnormal=statistics.fmean(seen.below(normal) for seen in looks),
        headroom=limits.max_log2 - max(tops) if tops else None,
        offences=offences,
    )
