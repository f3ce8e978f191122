"""Loss scaling from 1 to 100,000 ranks: what a step costs, and how often it is lost.

    python benchmarks/scale_out.py [--steps N]

Prints the two tables of docs/guides/large-jobs.md.  Plain Python; a minute.

The cost is a model: a tree all-reduce takes 2 ceil(log2 N) hops of `HOP` seconds, and
so few bytes that only hops count.  The skips are simulated: every rank draws its own
largest gradient around a common level, with a tail; rarely, a batch on one rank makes
its loss and gradients jump together; more rarely still, one is NaN whatever the scale
(a bad sample, a bad chip).  A step is lost if any rank's overflows.  The largest of N
draws is drawn at once, so that 100,000 ranks cost no more than one.
"""

import argparse
import math
import random
from collections.abc import Iterator
from typing import NamedTuple

import buoy
from buoy._core.ops import PLAIN

HOP = 10e-6  # seconds from node to node and back into a kernel
STEP = 0.5  # seconds of a training step, to compare with
RANKS = [1, 10, 100, 1_000, 10_000, 100_000]
STEPS = 20_000
LEVEL = -6.0  # log2 of a usual largest gradient, unscaled
TAIL = 0.3  # binades: how far one rank's largest lies above that, on average
JUMP = 1e-6  # chance of an outlier batch, per rank and step
HEIGHT = 3.0  # binades that it stands out on average, beyond two
BROKEN = 2e-8  # chance of a NaN at any scale, per rank and step
TOP = math.log2(65504.0)


class Draw(NamedTuple):
    """What the ranks of one step would show, all together."""

    amax_log2: float  # of the unscaled gradients
    loss: float
    broken: bool


def draws(ranks: int, steps: int, seed: int = 0) -> Iterator[Draw]:
    """Draw the largest of all ranks, step by step."""
    source = random.Random(seed)  # noqa: S311 - not for secrets
    for step in range(steps):
        level = LEVEL + 2.0 * math.sin(step / 3000.0)
        noise = -TAIL * math.log(-math.expm1(math.log(_unit(source)) / ranks))
        jump = 0.0
        if source.random() < -math.expm1(-JUMP * ranks):
            jump = 2.0 + source.expovariate(1.0 / HEIGHT)
        loss = 2.0 ** (jump + 0.1 * source.random())
        broken = source.random() < -math.expm1(-BROKEN * ranks)
        yield Draw(level + max(noise, jump), loss, broken)


def _unit(source: random.Random) -> float:
    return 1.0 - source.random()  # never 0


class Outcome(NamedTuple):
    """How a policy did."""

    skipped: float  # per 1000 steps
    unused: float  # binades of FP16 left unused above the largest gradient
    lowest: float  # log2 of the lowest scale


def run(policy: buoy.Policy, ranks: int, steps: int, *, foresees: bool) -> Outcome:
    """Let a policy move the scale of all ranks together."""
    state = policy.init()
    skipped = 0
    unused = []
    lowest = math.inf
    for draw in draws(ranks, steps):
        if foresees and "loss" in policy.wants:
            state = policy.foresee(state, draw.loss, ops=PLAIN)
        scale = math.log2(state.scale)
        lowest = min(lowest, scale)
        amax = draw.amax_log2 + scale
        finite = amax <= TOP and not draw.broken
        if finite:
            unused.append(TOP - amax)
        else:
            skipped += 1
        seen = buoy.Seen(finite=finite, amax_log2=amax if finite else math.inf)
        state = policy.update(state, seen, ops=PLAIN)
    mean = sum(unused) / len(unused) if unused else math.nan
    return Outcome(1000.0 * skipped / steps, mean, lowest)


def policies() -> dict[str, tuple[buoy.Policy, bool]]:
    """Name what is compared, and whether it is shown the loss."""
    headroom = buoy.policy("headroom")
    quick = buoy.policy("torch", growth_interval=100)
    return {
        "torch, default": (buoy.policy("torch"), False),
        "torch, growth_interval=100": (quick, False),
        "headroom": (headroom, False),
        "`LossAhead` of headroom": (buoy.LossAhead(headroom), True),
    }


def print_cost() -> None:
    """Print what agreeing costs, by the model."""
    print("| ranks | hops | one all-reduce | of a step of 0.5 s | with clipping |")
    print("|--:|--:|--:|--:|--:|")
    for ranks in (2, 8, 64, 512, 4096, 10_000, 100_000):
        hops = 2 * math.ceil(math.log2(ranks))
        once = hops * HOP
        print(
            f"| {ranks:,} | {hops} | {once * 1e6:.0f} us | {once / STEP:.3%} "
            f"| {2 * once / STEP:.3%} |"
        )


def print_skips(steps: int = STEPS) -> None:
    """Print what becomes of steps, by simulation."""
    print("| policy | ranks | skipped per 1000 | unused binades | lowest scale |")
    print("|---|--:|--:|--:|--:|")
    for name, (policy, foresees) in policies().items():
        for ranks in RANKS:
            found = run(policy, ranks, steps, foresees=foresees)
            print(
                f"| {name} | {ranks:,} | {found.skipped:.2f} | {found.unused:.1f} "
                f"| 2^{found.lowest:.0f} |"
            )


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    steps = parser.parse_args().steps
    print_cost()
    print()
    print_skips(steps)


if __name__ == "__main__":
    main()
