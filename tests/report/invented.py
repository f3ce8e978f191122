"""Invented runs to look at, and whether there is a browser to do it with."""

import math
import random
import shutil
from pathlib import Path

import pytest

from buoy.trace import Counts, Recorder

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")

in_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="Chromium or its driver is missing: make browser"
)


def spread(middle: float, size: int) -> Counts:
    """Make the counts of log-normal gradients as FP16 would hold them."""

    def below(log2: float) -> float:
        return size * (1.0 + math.erf((log2 - middle) / 4.5)) / 2.0

    counts = tuple(round(below(e + 1) - below(e)) for e in range(-24, 17))
    return Counts(-24, counts, zeros=round(below(-24)), size=size)


def record(path: Path, steps: int, *, seed: int = 0, shots: int = 20) -> Path:
    """Record an invented run: a scale that falls twice, two causes, a drift."""
    rng = random.Random(seed)
    scale = 2.0**16
    sizes = {"embed.weight": 4000, "block.weight": 900, "head.bias": 10}
    with Recorder(path, queue=10**6, meta={"model": "Net"}) as recorder:
        for step in range(steps):
            missed = step in (0, 1) or step % 997 == 500
            verdict = "forward_nonfinite" if step % 997 == 500 else "scale_too_high"
            size = 2.0 ** (-8 - 4 * step / steps + rng.gauss(0, 0.5))
            recorder.step(
                scale=scale,
                applied=not missed,
                verdict=verdict if missed else None,
                norm=math.inf if missed else 3.0 * size,
                amax=math.inf if missed else size,
                loss=math.nan
                if verdict == "forward_nonfinite" and missed
                else 2 * size,
                offenders=["head.bias"] if missed else (),
                time=1.7e9 + 0.1 * step,
            )
            if step % max(steps // shots, 1) == 3:
                seen = {
                    n: spread(-10 + i * 4, k) for i, (n, k) in enumerate(sizes.items())
                }
                recorder.histograms(step, scale, seen)
                recorder.flush()
            if missed and verdict == "scale_too_high":
                scale /= 2.0
    return path
