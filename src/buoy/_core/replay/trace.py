"""The trace of a run: the size of its gradients at every step.

All sizes are of unscaled gradients and in log2, so that a scale is an addition and one
trace serves every policy.  Files are read and written by `buoy.trace`.
"""

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from buoy._core.errors import TraceError
from buoy._core.formats import FP16_MAX_LOG2

__all__ = [
    "FP16_ZERO_LOG2",
    "Histogram",
    "Trace",
    "is_trace",
]

_WILD = 1e4  # a log2 beyond every format
FP16_ZERO_LOG2 = -25.0  # half the smallest subnormal: what is below rounds to zero


@dataclass(frozen=True, slots=True)
class Histogram:
    """The number of nonzero gradients between powers of two, from step `start` on.

    `counts[i]` counts magnitudes from 2^(low+i) up to 2^(low+i+1).  Within a bin they
    are assumed to be uniform in log2.  This is exact for scales that are powers of two,
    as in nearly every policy.

    Example:
        >>> half = Histogram(start=0, low=-30, counts=(1, 1))
        >>> half.below(-29.0), half.below(-28.5)
        (0.5, 0.75)
    """

    start: int
    low: int
    counts: tuple[float, ...]
    _shares: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if type(self.start) is not int or type(self.low) is not int:
            message = (
                "A histogram's `start` and `low` must be whole numbers, "
                f"got {self.start!r} and {self.low!r}."
            )
            raise TraceError(message)
        counts = tuple(self.counts)
        total = math.fsum(counts)
        if not all(c >= 0 for c in counts) or not 0 < total < math.inf:
            message = (
                f"The histogram at step {self.start} must hold counts that are not "
                f"negative and not all 0, got {counts!r}."
            )
            raise TraceError(message)
        object.__setattr__(self, "counts", counts)
        shares = tuple(c / total for c in accumulate(counts, initial=0))
        object.__setattr__(self, "_shares", shares)

    def below(self, log2: float) -> float:
        """Return the share of the gradients smaller than 2^log2."""
        place = log2 - self.low
        if not place > 0.0:
            return 0.0
        if place >= len(self.counts):
            return 1.0
        i = int(place)
        shares = self._shares
        return shares[i] + (place - i) * (shares[i + 1] - shares[i])


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Trace:
    """A recorded or synthetic run, one entry per step.

    A step overflows at scale S if `amax_log2` + log2(S) is above `max_log2`; if
    `amax_log2` is inf or NaN, it overflows at any scale.  A scaled gradient below
    2^`zero_log2` becomes 0.

    Example:
        >>> trace = Trace(amax_log2=(-3.0, 2.5, -3.0), loss_log2=(0.0, 5.0, 0.0))
        >>> len(trace), trace.has_histograms
        (3, False)
    """

    amax_log2: Sequence[float]  # of the largest |gradient|; -inf where all are 0
    loss_log2: Sequence[float] | None = None  # of |loss|; inf or NaN: it failed
    weight_histograms: Sequence[Histogram] = ()  # of the parameters' gradients
    activation_histograms: Sequence[Histogram] = ()  # of the gradients in between
    max_log2: float = FP16_MAX_LOG2
    zero_log2: float = FP16_ZERO_LOG2
    name: str = ""

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "amax_log2", _floats(self.amax_log2, "amax_log2"))
        if not self.amax_log2:
            message = "A trace needs at least one step, got `amax_log2` of length 0."
            raise TraceError(message)
        if self.loss_log2 is not None:
            put(self, "loss_log2", _floats(self.loss_log2, "loss_log2"))
            self._check_length(self.loss_log2)
        for limit in ("max_log2", "zero_log2"):
            self._check_limit(limit)
        if not self.zero_log2 < self.max_log2:
            message = (
                "`zero_log2` must be below `max_log2`, "
                f"got {self.zero_log2!r} and {self.max_log2!r}."
            )
            raise TraceError(message)
        if not isinstance(self.name, str):
            raise TraceError(f"`name` must be a string, got {self.name!r}.")
        for kind in ("weight_histograms", "activation_histograms"):
            put(self, kind, tuple(getattr(self, kind)))
            self._check_order(kind)

    def __len__(self) -> int:
        return len(self.amax_log2)

    def __repr__(self) -> str:
        more = ", with losses" if self.loss_log2 is not None else ""
        more += ", with histograms" if self.has_histograms else ""
        return f"Trace({self.name!r}, {len(self)} steps{more})"

    @property
    def has_histograms(self) -> bool:
        """Whether the trace contains histograms, which show underflow."""
        return bool(self.weight_histograms or self.activation_histograms)

    def head(self, steps: int) -> "Trace":
        """Return the first `steps` steps as a new trace."""
        return Trace(
            amax_log2=self.amax_log2[:steps],
            loss_log2=None if self.loss_log2 is None else self.loss_log2[:steps],
            weight_histograms=_until(self.weight_histograms, steps),
            activation_histograms=_until(self.activation_histograms, steps),
            max_log2=self.max_log2,
            zero_log2=self.zero_log2,
            name=self.name,
        )

    def _check_length(self, losses: Sequence[float]) -> None:
        if len(losses) != len(self):
            message = (
                "`loss_log2` must have one entry per step like `amax_log2`, "
                f"got {len(losses)} and {len(self)}."
            )
            raise TraceError(message)

    def _check_limit(self, limit: str) -> None:
        value = getattr(self, limit)
        real = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not real or not abs(value) <= _WILD:
            message = f"`{limit}` must be a number within +-{_WILD:g}, got {value!r}."
            raise TraceError(message)

    def _check_order(self, kind: str) -> None:
        if not all(isinstance(made, Histogram) for made in getattr(self, kind)):
            raise TraceError(f"`{kind}` must hold histograms only.")
        starts = [histogram.start for histogram in getattr(self, kind)]
        if starts and starts[0] < 0:
            message = f"`{kind}` must start at step 0 or later, got {starts[0]!r}."
            raise TraceError(message)
        for before, after in pairwise(starts):
            if after <= before:
                message = (
                    f"`{kind}` must be in the order of their steps, "
                    f"got {after!r} after {before!r}."
                )
                raise TraceError(message)


def _floats(values: Iterable[float], field_name: str) -> tuple[float, ...]:
    try:
        packed = isinstance(values, array) and values.typecode == "d"
        numbers = tuple(values if packed else map(float, values))
    except (TypeError, ValueError, OverflowError) as error:
        message = f"`{field_name}` must hold one number per step: {error}."
        raise TraceError(message) from error
    if max(map(abs, numbers), default=0.0) <= _WILD:  # also if some are NaN
        return numbers
    finite = list(filter(math.isfinite, numbers))
    for number in (min(finite, default=0.0), max(finite, default=0.0)):
        if abs(number) > _WILD:
            message = (
                f"`{field_name}` holds logarithms to base 2, within +-{_WILD:g} or "
                f"infinite, got {number!r}."
            )
            raise TraceError(message)
    return numbers


def _until(histograms: Sequence[Histogram], steps: int) -> Sequence[Histogram]:
    starts = [histogram.start for histogram in histograms]
    return histograms[: bisect_right(starts, steps - 1)]


def is_trace(value: object) -> "Trace":
    """Return a trace; raise for anything else."""
    if isinstance(value, Trace):
        return value
    message = (
        f"A `Trace` is needed, got {value!r}. Read a file with `buoy.trace.read(path)` "
        "or generate one with `buoy.trace.synthetic(kind)`."
    )
    raise TraceError(message)
