"""Print the CPU seconds and the memory that commands take for a long recorded run.

python benchmarks/long_trace.py [STEPS]
"""

import math
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

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


def main() -> None:
    """Record a run and time each command on it in a process of its own."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    with tempfile.TemporaryDirectory() as folder:
        record(Path(folder, "run.buoy"), steps)
        for command in COMMANDS:
            process = subprocess.Popen(  # noqa: S603 - our own command
                [sys.executable, "-m", "buoy", *command],
                cwd=folder,
                stdout=subprocess.DEVNULL,
            )
            _, status, used = os.wait4(process.pid, 0)
            seconds = used.ru_utime + used.ru_stime
            memory = used.ru_maxrss / 1024
            failed = f", failed ({status})" if status else ""
            name = " ".join(command)
            print(f"{name:40s} {seconds:6.1f} s of CPU, {memory:5.0f} MiB{failed}")


if __name__ == "__main__":
    main()
