"""Replay Headroom and torch's default over recorded traces, and compare.

A step overflows when log2 amax + log2 scale > log2 65504.  A gradient has underflowed
when it is nonzero and |g| * scale < 2^-25, so that FP16 rounds it to zero; shares are
of the nonzero gradients, averaged over all steps.  Histograms are per binade and block
of steps: within a binade, mass is spread evenly in |g|.

    python -m benchmarks.headroom.compare [tuning|held_out|fresh|all]
"""

import gzip
import json
import math
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import buoy
from benchmarks.headroom import split
from benchmarks.headroom.regimes import REGIMES

LIMIT = math.log2(65504.0)
ZERO = -25.0
SMALL = -20.0
TRACES = Path(__file__).parent / "traces"


class Shares:
    """Share of a block's nonzero gradients below 2^cut."""

    def __init__(self, packed: dict[str, Any], block: int) -> None:
        counts = np.array(packed["counts"], float)
        for i in range(1, len(counts)):  # a block without samples
            if not counts[i].sum():
                counts[i] = counts[i - 1]
        self.low = packed["low"]
        self.block = block
        total = np.cumsum(counts, 1) / counts.sum(1, keepdims=True)
        self.below = np.pad(total, ((0, 0), (1, 0)))


@dataclass
class Recorded:
    """One recorded training."""

    amax: np.ndarray
    loss: np.ndarray
    weights: Shares
    activations: Shares


@cache
def load(name: str) -> Recorded:
    """Read a trace from its file."""
    raw = json.loads(gzip.decompress((TRACES / f"{name}.json.gz").read_bytes()))
    return Recorded(
        np.array(raw["amax_log2"]) / 64,
        np.array(raw["loss_log2"]) / 64,
        Shares(raw["weights"], raw["block"]),
        Shares(raw["activations"], raw["block"]),
    )


@dataclass(frozen=True)
class Criteria:
    """How one grid compares with torch's."""

    runs: int
    runs_without_more_skips: int
    regimes: int
    regimes_without_more_skips: int
    regimes_with_less_underflow: int  # of the weights
    regimes_with_less_activation_underflow: int
    runs_within_a_tenth: int  # weight underflow at most 0.1 percentage points more


def judge(ours: np.ndarray, torch: np.ndarray) -> Criteria:
    """Count where ours is no worse."""
    more = ours - torch
    mean = more.mean(0)
    return Criteria(
        runs=more[..., 0].size,
        runs_without_more_skips=int((more[..., 0] <= 1e-9).sum()),
        regimes=len(mean),
        regimes_without_more_skips=int((mean[:, 0] <= 1e-9).sum()),
        regimes_with_less_underflow=int((mean[:, 1] < 0).sum()),
        regimes_with_less_activation_underflow=int((mean[:, 2] < 0).sum()),
        runs_within_a_tenth=int((more[..., 1] <= 0.1).sum()),
    )


def main() -> None:
    """Print the table and the counts."""
    from benchmarks.headroom.lanes import grid

    which = (sys.argv[1:] or ["all"])[0].upper()
    names = getattr(split, which)
    torch = grid(buoy.policy("torch"), names, "unseen")
    rows = {
        "torch": torch,
        "headroom": grid(buoy.Headroom(), names, "unseen"),
        "headroom, clipping": grid(buoy.Headroom(), names, "unseen", clips=True),
    }
    print(f"{len(names)} traces ({which.lower()}), {len(REGIMES)} regimes; each cell:")
    print("skipped per 1000 / % weight gradients lost / % activation gradients lost\n")
    for i, regime in enumerate([*REGIMES, "mean"]):
        print(regime)
        for label, found in rows.items():
            cell = found.mean(0)[i] if i < len(REGIMES) else found.mean((0, 1))
            print(f"    {label:24} {cell[0]:7.2f} / {cell[1]:8.4f} / {cell[2]:6.2f}")
    print()
    for label, found in rows.items():
        if label != "torch":
            print(f"{label}: {judge(found, torch)}")


if __name__ == "__main__":
    main()
