"""The best exponent of every step: the oracle that all regret is measured against."""

import math
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from buoy._core.replay.trace import Trace

__all__ = ["Best"]


class Best:
    """The largest whole exponent that does not overflow, step by step.

    There is none (None) where all gradients are 0 or one is non-finite at any scale.
    A scale between two powers of two is taken for the lower where it was too low and
    for the upper where it was too high.

    Example:
        >>> best = Best(Trace(amax_log2=(1.0, -4.0, float("nan"))))
        >>> best.exponents, best.too_low(0, 3, 13.5, ()), best.too_high(14.5, [0])
        ([14, 19, None], 7.0, 1.0)
    """

    def __init__(self, trace: Trace) -> None:
        self.exponents, self.complete = _exponents(trace)
        self._counts: Sequence[int] = range(len(trace) + 1)
        sizes = self.exponents
        if not self.complete:
            known = (best is not None for best in self.exponents)
            self._counts = array("q", accumulate(known, initial=0))
            sizes = [best or 0 for best in self.exponents]
        self._sums = array("d", accumulate(sizes, initial=0))

    def known(self, start: int, end: int) -> int:
        """Return the number of steps from start to end that have a best exponent."""
        return self._counts[end] - self._counts[start]

    def sum(self, start: int, end: int) -> float:
        """Return the sum of the best exponents from start to end."""
        total: float = self._sums[end] - self._sums[start]
        return total

    def too_low(
        self, start: int, end: int, exponent: float, lost: Sequence[int]
    ) -> float:
        """Return the sum of log2 distances by which applied steps were too low."""
        known = self.known(start, end)
        total = self.sum(start, end)
        for step in lost:
            best = self.exponents[step]
            if best is not None:
                known -= 1
                total -= best
        if not known:
            return 0.0
        whole = math.floor(exponent) if math.isfinite(exponent) else exponent
        return total - whole * known

    def too_high(self, exponent: float, lost: Sequence[int]) -> float:
        """Return the sum of log2 distances by which lost steps were too high."""
        whole = math.ceil(exponent) if math.isfinite(exponent) else exponent
        found = (self.exponents[step] for step in lost)
        return float(sum(max(0, whole - best) for best in found if best is not None))


def _exponents(trace: Trace) -> tuple[list[Any], bool]:
    """Return the best exponents, and whether every step has one."""
    floor = math.floor
    limit = trace.max_log2
    try:
        return [floor(limit - amax) for amax in trace.amax_log2], True
    except (OverflowError, ValueError):  # of infinity, of NaN
        found = [
            floor(limit - amax) if math.isfinite(amax) else None
            for amax in trace.amax_log2
        ]
        return found, False
