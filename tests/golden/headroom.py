"""Record golden traces of Headroom: the exact scales that every backend must give.

    python -m tests.golden.headroom

The events are drawn with a fixed seed; each trace is a kind of run.  Record them again
only if the rule is meant to change.
"""

import gzip
import json
import math
import random
from functools import cache
from pathlib import Path
from typing import Any

from buoy import Headroom, Seen

FILE = Path(__file__).with_name("headroom.json.gz")
STEPS, TRACES = 300, 24


def events(seed: int) -> list[list[Any]]:
    """Return the unscaled sizes of a run, and what else happens in each step.

    An event is: log2 of the largest unscaled gradient of the weights, of the largest
    hidden tensor, the share of small gradients, and whether the gradients and the loss
    are finite at any scale at all.
    """
    rng = random.Random(seed)
    size, noise = rng.uniform(-40, 4), rng.choice([0.0, 0.3, 2.0])
    above = rng.choice([-math.inf, -3.0, 3.0, 12.0, 30.0])
    period, gap = rng.choice([1, 10, 60]), rng.choice([0.0, 0.0, 12.0])
    bad, failed = rng.choice([0.0, 0.01, 0.1]), rng.choice([0.0, 0.05])
    found = []
    for step in range(STEPS):
        now = size + rng.gauss(0.0, 1.0) * noise + gap * (step // period % 2)
        now = round(64 * now) / 64
        hidden, share = now + above, rng.choice([math.nan, 0.0, 2.0**-15, 0.1])
        if rng.random() < 0.02:
            now = -math.inf
        finite, loss = rng.random() >= bad, rng.random() >= failed
        found.append([now, hidden, share, finite, loss])
    return found


def record() -> list[dict[str, Any]]:
    """Lead the rule through every run, on plain numbers."""
    traces = []
    for seed in range(TRACES):
        policy = Headroom()
        state = policy.init(scale=2.0 ** (3 * seed - 20))
        shown, scales = [], []
        for size, hidden, share, usable, loss in events(seed):
            k = math.log2(state.scale)
            finite = usable and loss and max(size, hidden) + k <= policy.max_log2
            amax = size + k if size + k >= -25.0 else -math.inf
            amax = amax if finite else math.inf
            seen = Seen(finite, amax, share if finite else math.nan, loss_finite=loss)
            state = policy.update(state, seen)
            shown.append([finite, amax, seen.underflow, loss])
            scales.append(math.log2(state.scale))
        traces.append({"start": 3 * seed - 20, "seen": shown, "scales": scales})
    return traces


@cache
def load() -> list[dict[str, Any]]:
    """Read the traces."""
    return list(json.loads(gzip.decompress(FILE.read_bytes())))


if __name__ == "__main__":
    FILE.write_bytes(gzip.compress(json.dumps(record()).encode(), mtime=0))
