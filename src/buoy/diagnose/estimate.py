"""Estimate how much of a tensor's gradient was lost to zero, from what is left.

A zero in a gradient is either lost, or zero by nature: a dead unit, a word that did not
occur.  What is left shows which: magnitudes of gradients are close to log-normal, so
the part below FP16's smallest number follows from the part above it.  Both readings of
the zeros are fitted; only if the one without natural zeros does not explain what is
seen are zeros taken to be natural.
"""

import math
from collections.abc import Callable, Sequence

from buoy.diagnose.shares import Share, Underflow, summed
from buoy.trace.counts import Counts
from buoy.trace.recording import Recording

__all__ = ["estimate_run", "estimate_underflow"]

_TINY = -24  # the exponent of FP16's smallest number; half of it rounds to 0
_NORMAL = -14  # the exponent of its smallest number with all its digits
_COARSE = 4  # binades below _TINY that averaging over ranks can reach
_DOUBT = 12.0  # twice the log-likelihood that the simpler reading may lack
_FEW = 20  # values that tell nothing
_NEAR, _RARE = 5, 1e-4  # binades above _TINY that are empty where nothing is lost


def estimate_underflow(seen: Counts) -> Share:
    """Estimate the share of a gradient that underflowed, from its histogram.

    Within one percentage point for log-normal gradients; docs/guides/diagnose.md says
    when it is not.

    Example:
        >>> left = (400, 800, 1200, 1600, 1800, 1800, 1500, 1100, 800, 400, 200)
        >>> round(estimate_underflow(Counts(low=-24, counts=left, zeros=350)).zero, 3)
        0.009
        >>> estimate_underflow(Counts(low=-10, counts=left, zeros=350)).zero
        0.0
    """
    visible = sum(seen.counts)
    if not visible:
        return Share(seen.zeros, 1.0 if seen.zeros else 0.0, 0.0)
    if seen.low < _TINY - _COARSE:  # smaller than FP16 can be: never was in FP16
        return Share(visible, 0.0, 0.0)
    lost = min(_lost(seen, visible), float(seen.zeros))
    there = visible + lost
    small = sum(seen.counts[: max(_NORMAL - seen.low, 0)])
    return Share(round(there), lost / there, small / there)


def estimate_run(run: Recording) -> Underflow | None:
    """Estimate the underflow of a recorded run from its last histograms, or None.

    Example:
        >>> from buoy.trace import Shot
        >>> shot = Shot(7, 2.0, {"w": Counts(low=-3, counts=(40, 80, 40), zeros=30)})
        >>> estimate = estimate_run(Recording("run.buoy", shots=[shot]))
        >>> estimate.scale, estimate.parameters["w"].zero
        (2.0, 0.0)
    """
    if not run.shots:
        return None
    shot = run.shots[-1]
    shares: dict[str, dict[str, Share]] = {"weight": {}, "activation": {}}
    for name, seen in shot.tensors.items():
        shares[seen.kind][name] = estimate_underflow(seen)
    return summed(shot.scale, shares["weight"], shares["activation"])


def _lost(seen: Counts, visible: int) -> float:
    """Tell how many of the zeros are lost values."""
    zeros = seen.zeros
    near = sum(seen.counts[: max(_TINY + _NEAR - seen.low, 0)])
    if not zeros or near < _RARE * visible:
        return 0.0
    if visible < _FEW:
        return float(zeros)
    bins = _bins(seen)
    of_rest, below = _fitted(bins, 0.0)
    if below >= zeros / (zeros + visible):
        return float(zeros)
    with_zeros, _ = _fitted(bins, float(zeros))
    total = zeros + visible
    free = zeros * math.log(zeros / total) + visible * math.log(visible / total)
    if 2.0 * (of_rest + free - with_zeros) < _DOUBT:
        return float(zeros)
    return visible * below / (1.0 - below)


Bin = tuple[float, float, float]  # lower and upper edge in log2, count


def _bins(seen: Counts) -> list[Bin]:
    """Give the edges that rounding to FP16 gives each binade."""
    found: dict[int, float] = {}
    for i, count in enumerate(seen.counts):
        exponent = max(seen.low + i, _TINY)
        found[exponent] = found.get(exponent, 0.0) + count
    return [(_edge(e), _edge(e + 1), n) for e, n in sorted(found.items()) if n]


def _edge(exponent: int) -> float:
    """Tell the smallest magnitude, in log2, that rounds into this binade or above."""
    if exponent > _NORMAL:
        return float(exponent)
    return math.log2(2.0 ** (exponent - _TINY) - 0.5) + _TINY


# -- a normal distribution of log2, fitted to binades ---------------------------------


def _fitted(bins: Sequence[Bin], zeros: float) -> tuple[float, float]:
    """Fit; return the log-likelihood and the share below what can be seen.

    With `zeros` they are values below it; without, the fit is of the rest alone.
    """
    n = sum(count for _, _, count in bins)
    floor = _edge(_TINY)
    mean = sum((a + b) / 2 * count for a, b, count in bins) / n
    mean = (mean * n + (floor - 2.0) * zeros) / (n + zeros)
    spread = sum(((a + b) / 2 - mean) ** 2 * count for a, b, count in bins)
    spread = math.sqrt((spread + (floor - 2.0 - mean) ** 2 * zeros) / (n + zeros))

    def likelihood(mu: float, width: float) -> float:
        return _likelihood(bins, zeros, mu, math.exp(width))

    mu, width = _climbed(likelihood, mean, math.log(max(spread, 0.3)))
    return likelihood(mu, width), _between(-math.inf, floor, mu, math.exp(width))


def _likelihood(bins: Sequence[Bin], zeros: float, mu: float, sigma: float) -> float:
    total = sum(
        count * math.log(max(_between(a, b, mu, sigma), 1e-300)) for a, b, count in bins
    )
    floor = _edge(_TINY)
    if zeros:
        below = _between(-math.inf, floor, mu, sigma)
        return total + zeros * math.log(max(below, 1e-300))
    above = _between(floor, math.inf, mu, sigma)
    return total - sum(n for _, _, n in bins) * math.log(max(above, 1e-300))


def _between(a: float, b: float, mu: float, sigma: float) -> float:
    """Return the share of a normal distribution between two numbers."""
    low, high = (a - mu) / sigma / math.sqrt(2), (b - mu) / sigma / math.sqrt(2)
    if low > 0:
        return 0.5 * (math.erfc(low) - math.erfc(high))
    return 0.5 * (math.erfc(-high) - math.erfc(-low))


def _climbed(
    height: Callable[[float, float], float], x: float, y: float
) -> tuple[float, float]:
    """Walk uphill in two directions, with steps that adapt to what they find."""
    here, steps = height(x, y), [1.0, 0.25]
    best = (x, y)
    for _ in range(400):
        start = best
        for axis in (0, 1):
            for sign in (1.0, -1.0):
                trial = list(best)
                trial[axis] += sign * steps[axis]
                there = height(trial[0], min(trial[1], 3.5))
                if there > here:
                    here, best = there, (trial[0], min(trial[1], 3.5))
                    steps[axis] *= sign * 1.6
                    break
            else:
                steps[axis] *= 0.4
        # Along a ridge the two directions move together.
        ahead = (2 * best[0] - start[0], min(2 * best[1] - start[1], 3.5))
        there = height(*ahead)
        if there > here:
            here, best = there, ahead
        if max(map(abs, steps)) < 1e-5:
            break
    return best
