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
    scale, clean = 2.0**16, 0
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
            clean = clean + 1 if fits else 0
            if not fits or clean == 2000:
                scale, clean = scale * 2.0 if fits else scale / 2.0, 0
            if step % 1000 == 0:
                counts = tuple(rng.randrange(900) for _ in range(30))
                seen = Counts(low=-20, counts=counts, size=sum(counts))
                recorder.histograms(step, scale, {f"block.{i}": seen for i in range(9)})
                recorder.flush()


def used_by(command: tuple[str, ...], folder: str, source: str) -> tuple[float, ...]:
    """Run a command of the version in `source`: CPU seconds, seconds, MiB."""
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
    passed = time.perf_counter() - start
    return used.ru_utime + used.ru_stime, passed, used.ru_maxrss / 1024


def main() -> None:
    """Record a run and time each command on it in a process of its own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--against", metavar="SRC", help="src of another version")
    chosen = parser.parse_args()
    here = str(Path(buoy.__file__).parents[1])
    sources = [str(Path(chosen.against).resolve())] if chosen.against else []
    print(f"{chosen.steps:,} steps")
    with tempfile.TemporaryDirectory() as folder:
        record(Path(folder, "run.buoy"), chosen.steps)
        for command in COMMANDS:
            found = [used_by(command, folder, source) for source in (*sources, here)]
            line = "; before: ".join(
                f"{cpu:5.1f} s of CPU, {passed:5.1f} s, {memory:4.0f} MiB"
                for cpu, passed, memory in reversed(found)
            )
            ratio = f"; {found[0][0] / found[-1][0]:.1f} x" if sources else ""
            print(f"{' '.join(command):40s} {line}{ratio}", flush=True)


if __name__ == "__main__":
    main()
