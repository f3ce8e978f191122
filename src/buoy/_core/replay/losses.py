"""The loss of a scale, in steps, block by block: the objective of tuning.

A skipped step costs 1.  Any other step costs the share of its gradients that underflow;
or, if the trace has no histograms, `BINADE_COST` for each factor of two that the scale
is below the largest that fits.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from operator import mul

from buoy._core.replay.oracle import Best
from buoy._core.replay.trace import Histogram, Trace
from buoy._core.replay.walk import Walk

__all__ = ["BINADE_COST", "Blocks", "quantile", "resamples"]

BINADE_COST = 1e-4

_MOST_BLOCKS = 64
_LEAST_STEPS = 16  # in a block: consecutive steps are correlated


class Blocks:
    """A trace cut into blocks of about equal length, to be resampled."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.best = Best(trace)
        count = min(_MOST_BLOCKS, max(1, len(trace) // _LEAST_STEPS))
        starts = [len(trace) * i // count for i in range(count)]
        ends = [*starts[1:], len(trace)]
        self.lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        # The parameters' gradients are what the update uses.
        histograms = trace.weight_histograms or trace.activation_histograms
        self.charges_binades = not histograms
        self._cut(starts, {histogram.start: histogram for histogram in histograms})
        self.fits = [Counter(part) for part in self._parts()]

    def _cut(self, starts: Sequence[int], histograms: dict[int, Histogram]) -> None:
        """Split further, so that each stretch has one block and one histogram."""
        self.cuts = sorted({*starts, *histograms})
        self._of: list[tuple[int, Histogram | None]] = []
        block = -1
        held = None
        begins = set(starts)
        for cut in self.cuts:
            block += cut in begins
            held = histograms.get(cut, held)
            self._of.append((block, held))

    def _parts(self) -> Iterator[list[float]]:
        """Yield the best exponents of each stretch; inf: any fits, -inf: none fits."""
        ends = [*self.cuts[1:], len(self.trace)]
        for start, end in zip(self.cuts, ends, strict=True):
            amax = self.trace.amax_log2[start:end]
            best = self.best.exponents[start:end]
            yield [_fitting(a, b) for a, b in zip(amax, best, strict=True)]

    def __len__(self) -> int:
        return len(self.lengths)

    def of_walk(self, went: Walk) -> list[float]:
        """Return the loss of a walk in each block; steps not reached count as lost."""
        totals = [float(length) for length in self.lengths]
        for start, end, exponent, cut, lost in went.stretches(self.cuts):
            block, histogram = self._of[cut - 1]
            used = end - start - len(lost)
            totals[block] -= used * (1.0 - self._underflow(histogram, exponent))
            if self.charges_binades:
                low = self.best.too_low(start, end, exponent, lost)
                totals[block] += BINADE_COST * low
        return totals

    def of_static(self, exponent: int) -> list[float]:
        """Return the loss of one fixed scale in each block."""
        totals = [float(length) for length in self.lengths]
        for fits, (block, histogram) in zip(self.fits, self._of, strict=True):
            used = sum(count for best, count in fits.items() if best >= exponent)
            totals[block] -= used * (1.0 - self._underflow(histogram, exponent))
            if self.charges_binades:
                totals[block] += BINADE_COST * sum(
                    (best - exponent) * count
                    for best, count in fits.items()
                    if exponent <= best < math.inf
                )
        return totals

    def of_skips(self, exponent: int) -> list[float]:
        """Return the number of avoidable skips of a fixed scale in each block."""
        skips = [0.0] * len(self)
        for fits, (block, _) in zip(self.fits, self._of, strict=True):
            skips[block] += sum(
                count for best, count in fits.items() if -math.inf < best < exponent
            )
        return skips

    def _underflow(self, histogram: Histogram | None, exponent: float) -> float:
        return histogram.below(self.trace.zero_log2 - exponent) if histogram else 0.0

    def mean(self, row: Sequence[float], drawn: Sequence[int] | None = None) -> float:
        """Return the mean per step, weighted by how often each block was drawn."""
        if drawn is None:
            return sum(row) / len(self.trace)
        total: float = sum(map(mul, row, drawn))
        steps: int = sum(map(mul, self.lengths, drawn))
        return total / steps


def _fitting(amax: float, best: int | None) -> float:
    if best is not None:
        return best
    return math.inf if amax < 0.0 else -math.inf


def resamples(count: int, blocks: int, seed: int) -> Iterator[list[int]]:
    """Yield how often each block is drawn, with replacement, `count` times."""
    import random  # noqa: PLC0415 - slow to import

    rng = random.Random(seed)  # noqa: S311 - not for secrets
    for _ in range(count):
        drawn = [0] * blocks
        for block in rng.choices(range(blocks), k=blocks):
            drawn[block] += 1
        yield drawn


def quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile: about that share of the values is below it."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
