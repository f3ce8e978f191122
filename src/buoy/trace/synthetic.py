"""Invented traces: one regime each, to see how a policy takes it.

The gradients' size wanders a little around a level, and the level does what the kind
says.  The loss moves with the level, as it does in a real run whose gradients are
proportional to it; the wandering is not in the loss.  A histogram holds for a block of
steps at their middle level: spikes are too short to be in one.
"""

import math
import random
from collections.abc import Callable
from itertools import accumulate, pairwise

from buoy._core.errors import TraceError
from buoy._core.replay.trace import Histogram, Trace

__all__ = ["KINDS", "synthetic"]

_LEVEL = -6.0  # log2 of the largest gradient before anything happens
_WANDER = 0.5  # binades: what is left of yesterday's noise is 0.9
_MOST_BLOCKS = 1024
# Deviation of log2 |gradient| and distance of its mean below the largest, in binades.
# Five deviations are the largest of some millions; activations lie lower and wider.
_WEIGHTS = (3.5, 17.5)
_ACTIVATIONS = (4.5, 25.0)

Level = Callable[[int, int, random.Random], list[float]]


def _stationary(steps: int, count: int, rng: random.Random) -> list[float]:
    del count, rng
    return [0.0] * steps


def _spikes(steps: int, count: int, rng: random.Random) -> list[float]:
    del count
    return [
        rng.uniform(4.0, 12.0) if rng.random() < 0.01 else 0.0 for _ in range(steps)
    ]


def _step_up(steps: int, count: int, rng: random.Random) -> list[float]:
    del count, rng
    return [0.0 if step < steps // 2 else 10.0 for step in range(steps)]


def _step_down(steps: int, count: int, rng: random.Random) -> list[float]:
    return [-level for level in _step_up(steps, count, rng)]


def _drift_up(steps: int, count: int, rng: random.Random) -> list[float]:
    del count, rng
    return [10.0 * step / steps for step in range(steps)]


def _drift_down(steps: int, count: int, rng: random.Random) -> list[float]:
    return [-2.0 * level for level in _drift_up(steps, count, rng)]


def _saw(steps: int, count: int, rng: random.Random) -> list[float]:
    del rng
    period = max(steps // count, 1)
    return [8.0 * (step % period) / period for step in range(steps)]


def _noise(steps: int, count: int, rng: random.Random) -> list[float]:
    del count
    return [rng.gauss(0.0, 2.0) for _ in range(steps)]


def _jumps(steps: int, count: int, rng: random.Random) -> list[float]:
    period = max(steps // count, 1)
    levels = [0.0] + [rng.uniform(-12.0, 12.0) for _ in range(count + 1)]
    return [levels[step // period] for step in range(steps)]


KINDS: dict[str, Level] = {
    "stationary": _stationary,
    "spikes": _spikes,
    "step_up": _step_up,
    "step_down": _step_down,
    "drift_down": _drift_down,
    "drift_up": _drift_up,
    "saw": _saw,
    "noise": _noise,
    "jumps": _jumps,
}


MOST_STEPS = 10_000_000


def synthetic(kind: str, steps: int = 10_000, seed: int = 0) -> Trace:
    """Generate a trace: the same arguments always give the same trace.

    All sizes are in binades (factors of two).  Kinds: stationary; spikes of 4 to 12 at
    1 % of the steps; step_up and step_down by 10 midway; drift_up by 10 and drift_down
    by 20; saw, ten teeth of 8; noise with a deviation of 2; jumps to ten levels within
    +-12.

    Example:
        >>> trace = synthetic("step_up", steps=100, seed=1)
        >>> len(trace), trace.name
        (100, 'synthetic:step_up')
    """
    if kind not in KINDS:
        message = f"There is no synthetic trace {kind!r}. Known: {', '.join(KINDS)}."
        raise TraceError(message)
    if type(steps) is not int or not 1 <= steps <= MOST_STEPS:
        message = (
            f"`steps` must be a whole number from 1 to {MOST_STEPS}, got {steps!r}."
        )
        raise TraceError(message)
    rng = random.Random(seed)  # noqa: S311 - not for secrets
    levels = KINDS[kind](steps, 10, rng)
    noise = accumulate(
        (rng.gauss(0.0, _WANDER * 0.44) for _ in range(steps)),
        lambda before, fresh: 0.9 * before + fresh,
    )
    return Trace(
        amax_log2=[_LEVEL + a + b for a, b in zip(levels, noise, strict=True)],
        loss_log2=levels,
        weight_histograms=_histograms(levels, *_WEIGHTS),
        activation_histograms=_histograms(levels, *_ACTIVATIONS),
        name=f"synthetic:{kind}",
    )


def _histograms(
    levels: list[float], deviation: float, distance: float
) -> list[Histogram]:
    """Make a log-normal histogram wherever the level has moved, seldom enough."""
    block = max(len(levels) // _MOST_BLOCKS, 16)
    made: list[Histogram] = []
    for start in range(0, len(levels), block):
        part = sorted(levels[start : start + block])
        mean = _LEVEL + part[len(part) // 2] - distance
        fresh = _log_normal(start, round(mean, 2), deviation)
        if not made or (made[-1].low, made[-1].counts) != (fresh.low, fresh.counts):
            made.append(fresh)
    return made


def _log_normal(start: int, mean: float, deviation: float) -> Histogram:
    low = math.floor(mean - 6.0 * deviation)
    edges = [low + i for i in range(math.ceil(12.0 * deviation) + 2)]
    below = [math.erf((edge - mean) / deviation / math.sqrt(2.0)) for edge in edges]
    counts = tuple(round(5e8 * (upper - lower)) for lower, upper in pairwise(below))
    return Histogram(start, low, counts)
