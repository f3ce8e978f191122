"""Estimate how much of a tensor's gradient was lost to zero, from what is left.

A zero in a gradient is either lost, or zero by nature: a dead unit, a word that did not
occur.  What is left shows which: magnitudes of gradients are close to log-normal, so
the part below FP16's smallest number follows from the part above it.  Both readings of
the zeros are fitted; only if the one without natural zeros does not explain what is
seen are zeros taken to be natural.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from buoy.diagnose.shares import Share, Underflow, summed
from buoy.trace.counts import Counts
from buoy.trace.recording import Recording

__all__ = ["estimate_run", "estimate_underflow"]

_TINY = -24  # the exponent of FP16's smallest number; half of it rounds to 0
_NORMAL = -14  # the exponent of its smallest number with all its digits
_COARSE = 4  # binades below _TINY that averaging over ranks can reach
_DOUBT = 12.0  # twice the log-likelihood that the simpler reading may lack
_FEW = 20  # values that tell nothing
_NEAR = 5  # binades above _TINY that are empty where nothing is lost
_RARE = 1e-4  # the share of values up to which those binades count as empty

# The fit: log2 of the magnitudes is normal, with a mean and a width.
_LOST_AT = 2.0  # binades below the smallest number where lost values are put at first
_NARROWEST = 0.3  # the standard deviation that the search starts from at least
_WIDEST = 3.5  # log of the largest standard deviation that is tried
_MOST_ROUNDS = 400
_STEPS = (1.0, 0.25)  # first steps of the mean and of the log of the width
_LONGER = 1.6  # a step that led uphill
_SHORTER = 0.4  # a step that did not
_CLOSE = 1e-5  # the step at which the search ends
_LEAST = 1e-300  # so that the logarithm of a share exists


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
    total = visible + lost
    small = sum(seen.counts[: max(_NORMAL - seen.low, 0)])
    return Share(round(total), lost / total, small / total)


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
    """Return how many of the zeros are lost values."""
    zeros = seen.zeros
    near = sum(seen.counts[: max(_TINY + _NEAR - seen.low, 0)])
    if not zeros or near < _RARE * visible:
        return 0.0
    if visible < _FEW:
        return float(zeros)

    # Fitted to the rest alone: the share of values that the format could not hold.
    bins = _bins(seen)
    of_rest, below = _fitted(bins, 0.0)
    total = zeros + visible
    if below >= zeros / total:
        return float(zeros)

    # Natural zeros are one more thing to fit: is what they explain worth it?
    with_zeros, _ = _fitted(bins, float(zeros))
    natural = zeros * math.log(zeros / total) + visible * math.log(visible / total)
    if 2.0 * (of_rest + natural - with_zeros) < _DOUBT:
        return float(zeros)
    return visible * below / (1.0 - below)


class _Bin(NamedTuple):
    """The values of one binade, as rounding to FP16 leaves them."""

    low: float  # log2 of the smallest magnitude that rounds into it
    high: float
    number: float  # of values

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2


def _bins(seen: Counts) -> list[_Bin]:
    """Return the binades that hold values, with the edges that rounding gives them."""
    found: dict[int, float] = {}
    for i, count in enumerate(seen.counts):
        exponent = max(seen.low + i, _TINY)
        found[exponent] = found.get(exponent, 0.0) + count
    return [_Bin(_edge(e), _edge(e + 1), n) for e, n in sorted(found.items()) if n]


def _edge(exponent: int) -> float:
    """Return the smallest magnitude, in log2, that rounds into this binade or above."""
    if exponent > _NORMAL:
        return float(exponent)
    return math.log2(2.0 ** (exponent - _TINY) - 0.5) + _TINY


# -- a normal distribution of log2, fitted to binades ---------------------------------


class _Fit(NamedTuple):
    """How well a normal distribution explains what is seen, and what it says."""

    likelihood: float  # its logarithm
    below: float  # the share of values that are too small to be seen


def _fitted(bins: Sequence[_Bin], zeros: float) -> _Fit:
    """Fit a normal distribution to the logarithms of the magnitudes.

    With `zeros` they are values below what can be seen; without, the fit is of the
    rest alone.
    """
    floor = _edge(_TINY)
    lost_at = floor - _LOST_AT
    visible = sum(b.number for b in bins)
    total = visible + zeros
    mean = (sum(b.middle * b.number for b in bins) + lost_at * zeros) / total
    squares = sum((b.middle - mean) ** 2 * b.number for b in bins)
    squares += (lost_at - mean) ** 2 * zeros
    deviation = math.sqrt(squares / total)

    def likelihood(mu: float, log_sigma: float) -> float:
        return _likelihood(bins, zeros, mu, math.exp(log_sigma))

    start = (mean, math.log(max(deviation, _NARROWEST)))
    mu, log_sigma = _highest(likelihood, start)
    below = _between(-math.inf, floor, mu, math.exp(log_sigma))
    return _Fit(likelihood(mu, log_sigma), below)


def _likelihood(bins: Sequence[_Bin], zeros: float, mu: float, sigma: float) -> float:
    """Return the log-likelihood of the bins, and of the zeros if there are any."""
    floor = _edge(_TINY)
    total = sum(b.number * _log(_between(b.low, b.high, mu, sigma)) for b in bins)
    if zeros:
        return total + zeros * _log(_between(-math.inf, floor, mu, sigma))
    visible = sum(b.number for b in bins)
    return total - visible * _log(_between(floor, math.inf, mu, sigma))


def _log(share: float) -> float:
    return math.log(max(share, _LEAST))


def _between(low: float, high: float, mu: float, sigma: float) -> float:
    """Return the share of a normal distribution between two numbers."""
    a = (low - mu) / sigma / math.sqrt(2)
    b = (high - mu) / sigma / math.sqrt(2)
    # In the upper tail, the complement of both keeps the digits.
    if a > 0:
        return 0.5 * (math.erfc(a) - math.erfc(b))
    return 0.5 * (math.erfc(-b) - math.erfc(-a))


_Point = tuple[float, float]


def _highest(height: Callable[[float, float], float], start: _Point) -> _Point:
    """Walk uphill in two directions, with steps that adapt to what they find."""
    best = start
    top = height(*best)
    steps = list(_STEPS)
    for _ in range(_MOST_ROUNDS):
        before = best
        for axis in (0, 1):
            for sign in (1.0, -1.0):
                move = [0.0, 0.0]
                move[axis] = sign * steps[axis]
                trial = _moved(best, move)
                reached = height(*trial)
                if reached > top:
                    top = reached
                    best = trial
                    steps[axis] *= sign * _LONGER
                    break
            else:
                steps[axis] *= _SHORTER
        # Along a ridge the two directions move together.
        trial = _moved(best, (best[0] - before[0], best[1] - before[1]))
        reached = height(*trial)
        if reached > top:
            top = reached
            best = trial
        if max(map(abs, steps)) < _CLOSE:
            break
    return best


def _moved(point: _Point, move: Sequence[float]) -> _Point:
    return point[0] + move[0], min(point[1] + move[1], _WIDEST)
