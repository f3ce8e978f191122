"""Regimes: what is done to a recorded trace before a policy is replayed over it.

A regime is a column of shifts, in binades, added to the gradients' log2 and,
where the loss moves with them, to the loss's. Plain NumPy, seeded by name.
"""

import zlib
from collections.abc import Callable

import numpy as np

Shift = Callable[[int, np.random.Generator], np.ndarray]
K = float(np.log2(1000.0))


def stationary(n: int, rng: np.random.Generator) -> np.ndarray:
    """Leave the trace as it was recorded."""
    return np.zeros(n)


def spikes(n: int, rng: np.random.Generator) -> np.ndarray:
    """Blow up single steps, one in a hundred, by 3 to 12 binades."""
    return np.where(rng.random(n) < 0.01, rng.uniform(3, 12, n), 0.0)


def rare_spikes(n: int, rng: np.random.Generator) -> np.ndarray:
    """Blow up one step in a thousand by 6 to 14 binades."""
    return np.where(rng.random(n) < 0.001, rng.uniform(6, 14, n), 0.0)


def times_1000(n: int, rng: np.random.Generator) -> np.ndarray:
    """Multiply by 1000 from the middle of the run on."""
    return np.where(np.arange(n) >= n // 2, K, 0.0)


def over_1000(n: int, rng: np.random.Generator) -> np.ndarray:
    """Divide by 1000 from the middle of the run on."""
    return -times_1000(n, rng)


def drift_down(n: int, rng: np.random.Generator) -> np.ndarray:
    """Fall by 20 binades over the run."""
    return np.linspace(0.0, -20.0, n)


def drift_up(n: int, rng: np.random.Generator) -> np.ndarray:
    """Rise by 10 binades over the run."""
    return np.linspace(0.0, 10.0, n)


def saw(n: int, rng: np.random.Generator) -> np.ndarray:
    """Rise by 8 binades over 250 steps, fall back at once, again and again."""
    return 8.0 * (np.arange(n) % 250) / 250


def saw_back(n: int, rng: np.random.Generator) -> np.ndarray:
    """Jump up by 8 binades at once, fall back over 250 steps."""
    return 8.0 * (1 - (np.arange(n) % 250) / 250)


def heavy_noise(n: int, rng: np.random.Generator) -> np.ndarray:
    """Multiply each step by 2 to the power of Student's t with 3 degrees."""
    return np.clip(rng.standard_t(3, n), -15, 15)


def jumps(n: int, rng: np.random.Generator) -> np.ndarray:
    """Jump to a new level within +-12 binades every 300 steps in the mean."""
    level = np.cumsum(rng.random(n) < 1 / 300)
    return np.concatenate([[0.0], rng.uniform(-12, 12, n)])[level]


def mixed(n: int, rng: np.random.Generator) -> np.ndarray:
    """Add jumps, drift, noise and spikes, each of random strength."""
    few = np.cumsum(rng.random(n) < rng.uniform(1, 5) / n)
    level = np.concatenate([[0.0], rng.uniform(-12, 12, n)])[few]
    drift = np.linspace(0.0, rng.uniform(-8, 8), n)
    burst = np.where(rng.random(n) < rng.uniform(0, 0.01), rng.uniform(2, 10, n), 0.0)
    return level + drift + burst + rng.uniform(0, 1) * rng.standard_normal(n)


REGIMES: dict[str, Shift] = {
    f.__name__: f
    for f in (
        stationary, spikes, rare_spikes, times_1000, over_1000, drift_down,
        drift_up, saw, saw_back, heavy_noise, jumps, mixed,
    )
}  # fmt: skip


def shifts(regime: str, trace: str, n: int, seed: int = 0) -> np.ndarray:
    """Return the shift column of a regime for a trace, always the same one."""
    key = zlib.crc32(f"{regime}/{trace}/{seed}".encode())
    return REGIMES[regime](n, np.random.default_rng(key))
