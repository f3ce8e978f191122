"""Generated worlds: what a policy meets that the weights' gradients do not show.

    python -m benchmarks.headroom.worlds

Printed: the % of 500 runs of 2000 steps that do not settle (more than 8 skips, and
then two within 500 steps), the % of those runs in which one scale fits all steps, and
the mean number of skips, by the noise in binades.

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
    loss: np.ndarray | None = None  # log2; not seen if None


def hidden(
    runs: int = 200, steps: int = 2000, seed: int = 0, *, wobble: float = 0.0
) -> World:
    """Ceilings at 2^-20 to 2^50, from any start, while visible gradients drift."""
    rng = np.random.default_rng(seed)
    size, drift = rng.uniform(-45, 4, runs), rng.choice([0, 0, -20, 8], runs)
    noise = rng.choice([0, 0.2, 1.0], runs) * rng.standard_normal((steps, runs))
    above = LIMIT - rng.integers(-20, 50, runs) - 0.5
    above = above + wobble * rng.standard_normal((steps, runs))
    visible = size + np.linspace(0, 1, steps)[:, None] * drift + noise
    start = rng.integers(-24, 65, runs).astype(float)
    return World(np.minimum(visible, above), above, start, _spread(rng, runs))


def alternating(
    runs: int = 200,
    steps: int = 2000,
    seed: int = 1,
    *,
    wobble: float = 0.0,
    beside: float = -3.0,
) -> World:
    """Two tasks 3 to 20 binades apart, in blocks of 1 to 200 steps."""
    rng = np.random.default_rng(seed)
    block = rng.choice([1, 1, 2, 3, 5, 10, 30, 100, 200], runs)
    turn = (np.arange(steps)[:, None] // block) % 2
    size = rng.uniform(-35, -15, runs) + turn * rng.uniform(3, 20, runs)
    start = np.where(rng.random(runs) < 0.5, 8.0, rng.integers(-24, 65, runs))
    size = size + wobble * rng.standard_normal((steps, runs))
    return World(size, size + beside, start, _spread(rng, runs))


def hidden_tasks(
    runs: int = 200, steps: int = 2000, seed: int = 2, *, wobble: float = 0.0
) -> World:
    """The same, but only hidden tensors alternate, 3 binades and more above."""
    world = alternating(runs, steps, seed, wobble=wobble)
    return replace(world, visible=world.visible.min(0) - 3 + 0 * world.visible)


def misleading(
    runs: int = 200, steps: int = 2000, seed: int = 3, *, wobble: float = 0.0
) -> World:
    """Losses that alternate by 3 to 25 binades while the gradients do not."""
    rng = np.random.default_rng(seed)
    size = rng.uniform(-30, 0, runs) + wobble * rng.standard_normal((steps, runs))
    turn = (np.arange(steps)[:, None] // rng.choice([1, 1, 2, 4], runs)) % 2
    start = np.full(runs, 8.0)
    loss = turn * rng.uniform(3, 25, runs) - 26.0
    return World(size, size - 3.0, start, _spread(rng, runs), loss)


def _spread(rng: np.random.Generator, runs: int) -> np.ndarray:
    return rng.choice([8.0, 20.0, 40.0], runs)


def bad_batches(
    runs: int = 64, steps: int = 4000, seed: int = 4, *, rate: float = 1 / 200
) -> World:
    """Gradients that stay, and steps that are not finite at any scale."""
    rng = np.random.default_rng(seed)
    size = -10 + 0.3 * rng.standard_normal((steps, runs))
    hidden = np.where(rng.random((steps, runs)) < rate, np.inf, size - 3.0)
    return World(size, hidden, np.full(runs, 8.0), np.full(runs, 40.0))


def too_low(policy: Any, world: World) -> float:
    """Return how far the scale is below what fits the weights' gradients, in binades.

    The mean after 1000 steps.
    """
    scales: list[np.ndarray] = []
    skips(policy, world, scales)
    return float(np.mean((LIMIT - world.visible - np.array(scales))[1000:]))


def skips(
    policy: Any, world: World, scales: list[np.ndarray] | None = None
) -> np.ndarray:
    """Return which steps of which runs are skipped; append log2 of their scales."""
    state = started(policy, len(world.start))
    state = replace(state, scale=np.exp2(world.start), planned=world.start.copy())
    scales = [] if scales is None else scales
    lost = []
    for step, (visible, above) in enumerate(
        zip(world.visible, world.hidden, strict=True)
    ):
        if world.loss is not None:
            state = policy.foresee(state, np.exp2(world.loss[step]), ops=ARRAYS)
        k = np.log2(state.scale)
        scales.append(k)
        size = visible + k
        finite = np.maximum(size, above + k) <= LIMIT
        lost.append(~finite)
        size = np.where(size < ZERO, -math.inf, size)
        share = None
        if MEASUREMENTS["underflow"].due(step):
            share = np.clip((SMALL - size + world.spread) / world.spread, 0, 1)
            share = np.where(finite & np.isfinite(size), share, math.nan)
        amax = None
        if MEASUREMENTS["amax_log2"].due(step):
            amax = np.where(finite, size, math.inf)
        seen = buoy.Seen(finite, amax, share)
        state = policy.update(state, seen, ops=ARRAYS)
    return np.array(lost)


def settles(skipped: np.ndarray) -> bool:
    """Return whether a run has 8 skips at most, apart from single ones in 500 steps."""
    return bool(np.all(np.diff(np.flatnonzero(skipped)[7:]) >= 500))


def fits(world: World) -> np.ndarray:
    """Return for which runs one scale fits all steps: no overflow, none is small."""
    most = np.floor(LIMIT - np.maximum(world.visible, world.hidden).max(0))
    return np.asarray(world.visible.min(0) + most - world.spread >= SMALL)


def main() -> None:
    """Print the table."""
    kinds = {
        "a hidden ceiling": lambda x: hidden(500, wobble=x),
        "tasks that alternate": lambda x: alternating(500, wobble=x),
        "the same, hidden tensors 2 binades above": lambda x: alternating(
            500, wobble=x, beside=2.0
        ),
        "the same, hidden tensors 6 binades above": lambda x: alternating(
            500, wobble=x, beside=6.0
        ),
        "only hidden tensors alternate": lambda x: hidden_tasks(500, wobble=x),
        "only the loss alternates": lambda x: misleading(500, wobble=x),
    }
    noises = (0.0, 0.25, 0.5, 1.0)
    print(
        "| world |",
        " | ".join(f"noise {x}" for x in noises),
        "|\n|---" + 4 * "|---" + "|",
    )
    for name, make in kinds.items():
        cells = [_cell(make(x)) for x in noises]
        print(f"| {name} |", " | ".join(cells), "|", flush=True)


def _cell(world: World) -> str:
    lost = skips(buoy.Headroom(), world)
    bad = np.array([not settles(run) for run in lost.T])
    whole, fitting = 100 * bad.mean(), 100 * bad[fits(world)].mean()
    return f"{whole:.1f} / {fitting:.1f} %, {lost.sum(0).mean():.1f}"


if __name__ == "__main__":
    main()
