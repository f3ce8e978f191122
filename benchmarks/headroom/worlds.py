"""Generated worlds: what a policy meets that the weights' gradients do not show.

    python -m benchmarks.headroom.worlds

Printed, of 500 runs of 2000 steps per row:

- hidden tensors, by their noise in binades: the % of the runs in which one scale fits
  all steps that do not settle (more than 10 skips, and then two in 500 steps); the
  mean skips of these runs; and the most skips of the other runs.
- bad batches, by their number in a row, a tenth of all steps: the % of good steps whose
  gradients are all zero, mean and worst run; and how far the scale is too low, in
  binades.

Sizes are log2 of the largest unscaled weight gradient (`visible`, measured) and of the
largest hidden tensor of the backward pass (`hidden`, not measured), one column per run.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

import buoy
from benchmarks.headroom.bad_batches import NAN_GRADIENTS, Schedule, clusters, every
from benchmarks.headroom.compare import LIMIT, SMALL, ZERO
from benchmarks.headroom.lanes import ARRAYS, started
from buoy._core.step import MEASUREMENTS

__all__ = [
    "Lived",
    "World",
    "alternating",
    "bad_batches",
    "fits",
    "hidden",
    "hidden_tasks",
    "live",
    "settles",
]


@dataclass
class World:
    """Sizes per step and run, the first scale, and how far gradients spread."""

    visible: np.ndarray
    hidden: np.ndarray  # inf: not finite at any scale
    start: np.ndarray  # log2
    spread: np.ndarray  # binades


@dataclass
class Lived:
    """What a policy did, per step and run."""

    scales: np.ndarray  # log2
    skipped: np.ndarray
    zero: np.ndarray  # applied with gradients that are all zero

    def too_low(self, world: World) -> float:
        """Return the mean binades from the scale to what fits the weights' gradients.

        Over the finite steps.
        """
        gap = LIMIT - world.visible - self.scales
        return float(np.mean(gap[~self.skipped]))


def hidden(
    runs: int = 200, steps: int = 2000, seed: int = 0, *, wobble: float = 0.0
) -> World:
    """Ceilings at 2^-20 to 2^50, from any start, while visible gradients drift."""
    rng = np.random.default_rng(seed)
    size = rng.uniform(-45, 4, runs)
    drift = rng.choice([0, 0, -20, 8], runs)
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


def bad_batches(
    schedule: Schedule, runs: int = 200, steps: int = 2000, seed: int = 4
) -> World:
    """Gradients of 2^-40 to 2^4 that stay, and steps that are not finite at all."""
    rng = np.random.default_rng(seed)
    bad = np.array([schedule(rng, steps) for _ in range(runs)]).T != 0
    noise = rng.choice([0, 0.3, 1.0], runs) * rng.standard_normal((steps, runs))
    size = rng.uniform(-40, 4, runs) + noise
    start = np.full(runs, 8.0)
    return World(size, np.where(bad, np.inf, size - 3.0), start, _spread(rng, runs))


def _spread(rng: np.random.Generator, runs: int) -> np.ndarray:
    return rng.choice([8.0, 20.0, 40.0], runs)


def live(policy: buoy.Policy, world: World) -> Lived:
    """Lead a policy through a world."""
    state = replace(started(policy, len(world.start)), scale=np.exp2(world.start))
    lived = []
    for step, (visible, above) in enumerate(
        zip(world.visible, world.hidden, strict=True)
    ):
        k = np.log2(state.scale)
        size = visible + k
        finite = np.maximum(size, above + k) <= LIMIT
        lived.append((k, ~finite, finite & (size < ZERO)))
        size = np.where(size < ZERO, -math.inf, size)
        share = None
        if MEASUREMENTS["underflow"].due(step):
            share = np.clip((SMALL - size + world.spread) / world.spread, 0, 1)
            share = np.where(finite & np.isfinite(size), share, math.nan)
        amax = None
        if MEASUREMENTS["amax_log2"].due(step):
            amax = np.where(finite, size, math.inf)
        state = policy.update(state, buoy.Seen(finite, amax, share), ops=ARRAYS)
    return Lived(*map(np.array, zip(*lived, strict=True)))


def settles(skipped: np.ndarray) -> bool:
    """Return whether a run has 10 skips at most, and then one in 500 steps."""
    return bool(np.all(np.diff(np.flatnonzero(skipped)[9:]) >= 500))


def fits(world: World) -> np.ndarray:
    """Return for which runs one scale fits all steps: no overflow, none is small."""
    most = np.floor(LIMIT - np.maximum(world.visible, world.hidden).max(0))
    return np.asarray(world.visible.min(0) + most - world.spread >= SMALL)


KINDS: dict[str, Callable[[float], World]] = {
    "a hidden ceiling": lambda x: hidden(500, wobble=x),
    "tasks that alternate": lambda x: alternating(500, wobble=x),
    "hidden tensors 2 binades above them": lambda x: alternating(
        500, wobble=x, beside=2.0
    ),
    "hidden tensors 6 binades above them": lambda x: alternating(
        500, wobble=x, beside=6.0
    ),
    "only hidden tensors alternate": lambda x: hidden_tasks(500, wobble=x),
}


def in_a_row(length: int, share: float = 0.1) -> Schedule:
    """Clusters of this length at random places, so many that they are this share."""

    def schedule(rng: np.random.Generator, steps: int) -> np.ndarray:
        codes = np.zeros(steps, int)
        for start in rng.choice(steps, int(steps * share / length), replace=False):
            codes[start : start + length] = NAN_GRADIENTS
        return codes

    return schedule


BAD: dict[str, Schedule] = {
    **{f"{length} in a row": in_a_row(length) for length in (1, 2, 3, 5, 10)},
    "1 to 10 in a row": clusters(NAN_GRADIENTS),
    "3 in a row, every 150 steps": every(NAN_GRADIENTS),
    "single, 1 step in 200": in_a_row(1, 0.005),
}


def main() -> None:
    """Print both tables."""
    noises = (0.0, 0.25, 1.0)
    print("| hidden tensors |", " | ".join(f"noise {x}" for x in noises), "|")
    print("|---" * (len(noises) + 1) + "|")
    for name, make in KINDS.items():
        print(f"| {name} |", " | ".join(_cell(make(x)) for x in noises), "|")
    print("\n| bad batches | zero | scale too low |\n|---|---|---|")
    for name, schedule in BAD.items():
        world = bad_batches(schedule, 500)
        lived = live(buoy.Headroom(), world)
        zero = 100 * lived.zero.sum(0) / np.isfinite(world.hidden).sum(0)
        print(
            f"| {name} | {zero.mean():.2f} %, {zero.max():.2f} % |"
            f" {lived.too_low(world):.1f} |"
        )


def _cell(world: World) -> str:
    skipped = live(buoy.Headroom(), world).skipped
    unsettled = np.array([not settles(run) for run in skipped.T])
    fitting = fits(world)
    counts = skipped.sum(0)
    share = 100 * unsettled[fitting].mean()
    mean = counts[fitting].mean()
    return f"{share:.1f} %, {mean:.1f}, {counts[~fitting].max(initial=0)}"


if __name__ == "__main__":
    main()
