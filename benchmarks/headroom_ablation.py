"""What each constant and branch of Headroom is worth: replay and worlds without it.

    python benchmarks/headroom_ablation.py

Replay: skipped per 1000 steps / % of weight gradients / % of activation gradients lost,
mean over 48 traces and 12 regimes, the loss blind to them.  Worlds: mean and largest
number of skips in 200 generated runs of 2000 steps with a hidden ceiling, with tasks
that alternate while hidden tensors are 6 binades above, and with hidden tensors alone
that alternate and have a noise of 1 binade.  Misleading loss: the mean number of skips,
and how many binades the scale is too low, if the loss alternates while the gradients do
not.  Bad batches: how many it is too low if 1 step in 200 is not finite at any scale,
and the loss does not show it.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

import buoy
from benchmarks.headroom.lanes import grid
from benchmarks.headroom.split import ALL
from benchmarks.headroom.worlds import (
    alternating,
    bad_batches,
    hidden,
    hidden_tasks,
    misleading,
    skips,
    too_low,
)
from buoy._core.policies import headroom, headroom_ceiling, headroom_size
from buoy._core.policies.headroom_ceiling import UNIT
from buoy._core.step import MEASUREMENTS

NEVER = 1e6 * UNIT
WORLDS = (
    hidden,
    lambda: alternating(wobble=0.25, beside=6.0),
    lambda: hidden_tasks(wobble=1.0),
)
VARIANTS: dict[str, dict[str, float]] = {
    "the rule": {},
    "no margin beyond the largest spike": {"SAFETY": 0.0},
    "no half of a spike's height added": {"SPREAD": 0.0},
    "an overflow counts as just above the limit": {"BEYOND": 0.0},
    "margin may be cut to 1 bit": {"CHEAPEST": UNIT},
    "margin is cut by 1 bit at a time": {"CUT": UNIT},
    "retreat by 1 bit, not 8": {"RETREAT": 1.0},
    "zeros may climb to 2^64": {"BLIND": 64.0},
    "zeros do not lower the level": {"FADE": 0.0},
    "the loss is always believed": {"DOUBTS": NEVER},
    "the loss is never believed": {"DOUBTS": 0.0},
    "every jump of the loss is judged": {"ALARM": 0.0},
    "a ceiling never holds": {"LEAST": 1.0, "MOST": 1.0},
    "a ceiling does not hold for longer each time": {"LONGER": 1.0},
    "it does for any level that explains an overflow": {"NEAR": NEVER},
    "2 bits down at a ceiling that holds, not 4": {"MISSED": 2.0},
    "4 bits down at a free ceiling, not 2": {"HIT": 4.0},
    "the ceiling rises at a constant rate": {"HASTE": 1.0},
    "an overflow soon after another one is a spike": {"RECENT": 0.0},
    "the hold is forgotten after 64 steps": {"FORGET": 64.0},
    "it is also forgotten while the scale is at the ceiling": {"KEEP": 0.0},
    "a ceiling that held for 2048 steps is like any other": {"PROVEN": NEVER},
    "an overflow with the widest margin is like any other": {"FULL": -UNIT},
    "a new level may lead to the scale that failed": {"BELOW": -NEVER},
    "every overflow at a ceiling that holds lowers it by 4": {"SOON": NEVER},
    "only single overflows at a ceiling that holds lower it": {"SOON": 0.0},
    "single overflows at a ceiling that holds do not lower it": {"SINGLE": 0.0},
    "hold at most 512 steps": {"MOST": 512.0},
    "the largest gradient measured in every 2nd step": {"every": 2},
    "in every 5th, else inferred from the norm (clipping)": {"clips": True},
    "the same with the last distance from the norm": {"clips": True, "SLOW": 1.0},
}


@contextmanager
def changed(constants: dict[str, float]) -> Iterator[None]:
    """Run the rule with other constants, or with fewer measurements."""
    often = MEASUREMENTS["amax_log2"]
    rarely = replace(often, every=int(constants.get("every", often.every)))
    homes = [
        (module, name)
        for module in (headroom, headroom_ceiling, headroom_size)
        for name in constants
        if hasattr(module, name)
    ]
    before = [getattr(*home) for home in homes]
    for module, name in homes:
        setattr(module, name, constants[name])
    MEASUREMENTS[often.name] = rarely
    try:
        yield
    finally:
        MEASUREMENTS[often.name] = often
        for (module, name), value in zip(homes, before, strict=True):
            setattr(module, name, value)


def main() -> None:
    """Print the table."""
    print(
        "| variant | replay | hidden ceilings | alternating tasks | hidden tasks |"
        " misleading loss | bad batches |\n|---|---|---|---|---|---|---|"
    )
    for name, constants in VARIANTS.items():
        with changed(constants):
            policy = buoy.Headroom()
            clips = bool(constants.get("clips"))
            a, b, c = grid(policy, ALL, "blind", clips=clips).mean((0, 1))
            cells = ["-"] * 5 if clips else generated(policy)
        replayed = f"{a:.3f} / {b:.4f} / {c:.3f}"
        print("| " + " | ".join((name, replayed, *cells)) + " |", flush=True)


def generated(policy: buoy.Headroom) -> list[str]:
    """Run a policy in worlds without clipping."""
    worlds = [skips(policy, make()).sum(0) for make in WORLDS]
    cells = [f"{np.mean(world):.1f}, {np.max(world)}" for world in worlds]
    lost, low = skips(policy, misleading()).sum(0), too_low(policy, misleading())
    cells.append(f"{np.mean(lost):.1f}, {low:.1f}")
    return [*cells, f"{too_low(policy, bad_batches()):.1f}"]


if __name__ == "__main__":
    main()
