"""What each constant of Headroom is worth: the rule with another value of it.

    python benchmarks/headroom_ablation.py [--quick]

Replay: skipped per 1000 steps / % of weight gradients / % of activation gradients lost,
mean over 48 traces and 12 regimes, the loss not seen; the second cell with clipping.
Worlds: the % of generated runs in which one scale fits and that do not settle, hidden
tensors 6 binades above alternating tasks; and the most skips of a run in which no scale
fits.  Bad batches: the % of good steps with zero gradients in the worst of 500 runs,
clusters of 1 to 10, and single ones.  Trainings: the most skips in two real trainings,
one with heavy tails in a hidden tensor and one with clusters of bad batches, and the %
of weight gradients that the second loses (not with `--quick`).
"""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

import buoy
from benchmarks.headroom.bad_batches import NAN_GRADIENTS, clusters
from benchmarks.headroom.lanes import grid
from benchmarks.headroom.split import ALL
from benchmarks.headroom.worlds import (
    alternating,
    bad_batches,
    fits,
    hidden,
    in_a_row,
    live,
    settles,
)
from buoy._core.policies import headroom

VARIANTS: dict[str, dict[str, float]] = {
    "the rule": {},
    "the peak fades half as fast": {"FADE": 3 / 128},
    "twice as fast": {"FADE": 3 / 32},
    "the margin is always 8": {"NARROW": 8.0},
    "always 4": {"WIDE": 4.0},
    "few small gradients: 2^-10": {"FEW": 2.0**-10},
    "zero gradients raise by 4": {"CLIMB": 4.0},
    "before any measurement at most to 2^16": {"BLIND": 16.0},
    "an overflow leads to 4 below the level": {"DEEP": 4.0},
    "to 20 below": {"DEEP": 20.0},
    "overflows lower a ceiling by 1": {"CRAWL": 1.0},
    "by 4": {"CRAWL": 4.0},
    "a ceiling falls back by 2": {"UNDO": 2.0},
    "as far as it rose": {"UNDO": 100.0},
    "an overflow is never soon": {"SOON": -math.inf},
    "it is for 16 steps": {"SOON": 16.0},
    "patience starts at 16": {"SHORT": 16.0},
    "patience is 64 at most": {"LONG": 64.0},
    "patience does not grow": {"LONGER": 1.0},
    "no hurry at zero gradients": {"HURRY": 1.0},
    "no rest after a failure": {"REST": 0.0},
}


@contextmanager
def changed(constants: dict[str, float]) -> Iterator[None]:
    """Run the rule with other constants."""
    before = {name: getattr(headroom, name) for name in constants}
    for name, value in constants.items():
        setattr(headroom, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(headroom, name, value)


def replayed(*, clips: bool) -> str:
    """Replay everything."""
    a, b, c = grid(buoy.Headroom(), ALL, "unseen", clips=clips).mean((0, 1))
    return f"{a:.2f} / {b:.4f} / {c:.2f}"


def generated() -> str:
    """Run worlds in which one scale fits, and others."""
    world = alternating(500, beside=6.0)
    skipped = live(buoy.Headroom(), world).skipped[:, fits(world)]
    unsettled = 100 * np.mean([not settles(run) for run in skipped.T])
    world = hidden(500)
    most = live(buoy.Headroom(), world).skipped[:, ~fits(world)].sum(0).max()
    return f"{unsettled:.1f} %, {most}"


def zero() -> str:
    """Run generated worlds with bad batches."""
    cells = []
    for schedule in (clusters(NAN_GRADIENTS), in_a_row(1)):
        world = bad_batches(schedule, 500)
        steps = live(buoy.Headroom(), world).zero.sum(0)
        share = steps / np.isfinite(world.hidden).sum(0)
        cells.append(f"{100 * share.max():.1f} %")
    return ", ".join(cells)


def trained() -> str:
    """Train, with three seeds each."""
    from benchmarks.headroom import trainings

    seeds = range(3)
    skips = max(trainings.run("hidden_tails", "headroom", s).skips for s in seeds)
    bad = [trainings.run("nan_gradients_clusters", "headroom", s) for s in seeds]
    trainings.TRAININGS.forget()
    return f"{skips}; {max(one.lost for one in bad):.2f} %"


def main() -> None:
    """Print the table."""
    quick = "--quick" in sys.argv[1:]
    print("| variant | replay | with clipping | worlds | bad batches | trainings |")
    print("|---|---|---|---|---|---|")
    for name, constants in VARIANTS.items():
        with changed(constants):
            cells = [replayed(clips=False), replayed(clips=True), generated(), zero()]
            cells.append("-" if quick else trained())
        print("| " + " | ".join((name, *cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
