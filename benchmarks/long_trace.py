"""Print the time and the memory that commands take for a long recorded run.

python benchmarks/long_trace.py [--steps N] [--against SRC]

`--against` names the `src` folder of another version.  Both versions then read the same
file, in turn, and the last column is the ratio of their CPU seconds.
"""

import argparse
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import buoy
from buoy.trace import Counts, Recorder

COMMANDS = (
    ("watch", "run.buoy", "--once"),
    ("replay", "run.buoy", "-p", "torch", "-p", "headroom"),
    ("report", "run.buoy"),
)


def record(path: Path, steps: int) -> None:
    """Record a run under torch's rule whose gradients shrink by four bits."""
    rng = random.Random(0)  # noqa: S311 - not for secrets
    scale = 2.0**16
    clean = 0  # steps since the scale moved
    with Recorder(path, queue=steps) as recorder:
        for step in range(steps):
            size = 2.0 ** (-8.0 - 4.0 * step / steps + rng.gauss(0.0, 0.5))
            fits = size * scale < 65504.0
            recorder.step(
                scale=scale,
                applied=fits,
                amax=size if fits else math.inf,
                norm=3.0 * size if fits else math.inf,
                loss=2.0 * size,
                offenders=() if fits else ("block.3.weight",),
            )
            clean += 1
            if not fits:
                scale /= 2.0
                clean = 0
            elif clean == 2000:
                scale *= 2.0
                clean = 0
            if step % 1000 == 0:
                counts = tuple(rng.randrange(900) for _ in range(30))
                seen = Counts(low=-20, counts=counts, size=sum(counts))
                recorder.histograms(step, scale, {f"block.{i}": seen for i in range(9)})
                recorder.flush()


class Used(NamedTuple):
    """What a command took."""

    cpu: float  # seconds
    wall: float  # seconds
    memory: float  # MiB

    def __str__(self) -> str:
        return f"{self.cpu:5.1f} s of CPU, {self.wall:5.1f} s, {self.memory:4.0f} MiB"


def used_by(command: tuple[str, ...], folder: str, source: str) -> Used:
    """Run a command of the version in `source`."""
    start = time.perf_counter()
    process = subprocess.Popen(  # noqa: S603 - our own command
        [sys.executable, "-m", "buoy", *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": source},
        stdout=subprocess.DEVNULL,
    )
    _, status, used = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"`buoy {' '.join(command)}` failed ({status}).")
    return Used(
        cpu=used.ru_utime + used.ru_stime,
        wall=time.perf_counter() - start,
        memory=used.ru_maxrss / 1024,
    )


def main() -> None:
    """Record a run and time each command on it in a process of its own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--against", metavar="SRC", help="src of another version")
    chosen = parser.parse_args()
    here = str(Path(buoy.__file__).parents[1])
    print(f"{chosen.steps:,} steps")
    with tempfile.TemporaryDirectory() as folder:
        record(Path(folder, "run.buoy"), chosen.steps)
        for command in COMMANDS:
            if chosen.against:
                before = used_by(command, folder, str(Path(chosen.against).resolve()))
                now = used_by(command, folder, here)
                line = f"{now}; before: {before}; {before.cpu / now.cpu:.1f} x"
            else:
                line = str(used_by(command, folder, here))
            print(f"{' '.join(command):40s} {line}", flush=True)


if __name__ == "__main__":
    main()
