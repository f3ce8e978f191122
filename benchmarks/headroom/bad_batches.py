"""Schedules of bad batches: which steps of a run are bad, and how.

A schedule maps a random generator and a number of steps to a code for each step.
"""

from collections.abc import Callable

import numpy as np

__all__ = [
    "GOOD",
    "INF_LOSS",
    "NAN_GRADIENTS",
    "NAN_LOSS",
    "Schedule",
    "at",
    "clusters",
    "every",
    "single",
]

GOOD, NAN_LOSS, NAN_GRADIENTS, INF_LOSS = range(4)  # the loss of the third is finite

Schedule = Callable[[np.random.Generator, int], np.ndarray]


def single(kind: int, share: float = 0.01) -> Schedule:
    """Make single steps bad, at random."""

    def schedule(rng: np.random.Generator, steps: int) -> np.ndarray:
        return np.where(rng.random(steps) < share, kind, GOOD)

    return schedule


def every(kind: int, period: int = 150, length: int = 3) -> Schedule:
    """Make some steps in a row bad, once per period."""

    def schedule(rng: np.random.Generator, steps: int) -> np.ndarray:
        return np.where(np.arange(steps) % period >= period - length, kind, GOOD)

    return schedule


def at(kind: int, *steps: int) -> Schedule:
    """Make the steps with these indices bad."""

    def schedule(rng: np.random.Generator, total: int) -> np.ndarray:
        return np.where(np.isin(np.arange(total), steps), kind, GOOD)

    return schedule


def clusters(*kinds: int, share: float = 0.1, longest: int = 10) -> Schedule:
    """Make clusters of random length bad, up to a share of all steps.

    Each cluster is of one of the kinds.
    """

    def schedule(rng: np.random.Generator, steps: int) -> np.ndarray:
        codes = np.full(steps, GOOD)
        while True:
            start = rng.integers(steps)
            length = rng.integers(1, longest + 1)
            codes[start : start + length] = rng.choice(kinds)
            if np.mean(codes != GOOD) > share - longest / 2 / steps:
                return codes

    return schedule
