"""Generated worlds: what a policy meets that the weights' gradients do not show.

Sizes are log2 of the largest unscaled weight gradient (`visible`, measured) and of the
largest hidden tensor of the backward pass (`hidden`, not measured), one column per run.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import buoy
from benchmarks.headroom.compare import LIMIT, SMALL, ZERO
from benchmarks.headroom.lanes import ARRAYS, started
from buoy._core.step import MEASUREMENTS


@dataclass
class World:
    """Sizes per step and run, the first scale, and how far gradients spread."""

    visible: np.ndarray
    hidden: np.ndarray
    start: np.ndarray  # log2
    spread: np.ndarray  # binades


def hidden(runs: int = 200, steps: int = 2000, seed: int = 0) -> World:
    """Ceilings at 2^-20 to 2^50, from any start, while visible gradients drift."""
    rng = np.random.default_rng(seed)
    size, drift = rng.uniform(-45, 4, runs), rng.choice([0, 0, -20, 8], runs)
    noise = rng.choice([0, 0.2, 1.0], runs) * rng.standard_normal((steps, runs))
    above = np.tile(LIMIT - rng.integers(-20, 50, runs) - 0.5, (steps, 1))
    visible = size + np.linspace(0, 1, steps)[:, None] * drift + noise
    start = rng.integers(-24, 65, runs).astype(float)
    return World(np.minimum(visible, above), above, start, _spread(rng, runs))


def alternating(runs: int = 200, steps: int = 2000, seed: int = 1) -> World:
    """Two tasks 3 to 20 binades apart, in blocks of 1 to 200 steps."""
    rng = np.random.default_rng(seed)
    block = rng.choice([1, 1, 2, 3, 5, 10, 30, 100, 200], runs)
    turn = (np.arange(steps)[:, None] // block) % 2
    size = rng.uniform(-35, -15, runs) + turn * rng.uniform(3, 20, runs)
    start = np.where(rng.random(runs) < 0.5, 8.0, rng.integers(-24, 65, runs))
    return World(size, size - 3, start, _spread(rng, runs))


def _spread(rng: np.random.Generator, runs: int) -> np.ndarray:
    return rng.choice([8.0, 20.0, 40.0], runs)


def skips(policy: Any, world: World) -> np.ndarray:
    """Return the number of skipped steps of each run."""
    state = started(policy, len(world.start))
    state = replace(state, scale=np.exp2(world.start), planned=world.start.copy())
    lost = np.zeros(len(world.start))
    for step, (visible, above) in enumerate(
        zip(world.visible, world.hidden, strict=True)
    ):
        k = np.log2(state.scale)
        size = visible + k
        finite = np.maximum(size, above + k) <= LIMIT
        lost += ~finite
        size = np.where(size < ZERO, -math.inf, size)
        share = None
        if MEASUREMENTS["underflow"].due(step):
            share = np.clip((SMALL - size + world.spread) / world.spread, 0, 1)
            share = np.where(finite & np.isfinite(size), share, math.nan)
        seen = buoy.Seen(finite, np.where(finite, size, math.inf), share)
        state = policy.update(state, seen, ops=ARRAYS)
    return lost
