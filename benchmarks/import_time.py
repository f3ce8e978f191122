"""What `import buoy` and `buoy --help` cost over a bare interpreter.

    python benchmarks/import_time.py [--rounds N]

Interleaved runs in fresh interpreters, median of many.  Budgets: 50 ms and 300 ms.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

COMMANDS = {
    "bare python": [sys.executable, "-c", "pass"],
    "import buoy": [sys.executable, "-c", "import buoy"],
    "a policy": [sys.executable, "-c", "import buoy; buoy.policy('headroom')"],
    "buoy --help": [sys.executable, "-m", "buoy", "--help"],
}


# As installed: with compiled files, whatever this shell says about writing them.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}


def seconds(command: list[str]) -> float:
    """Time one run."""
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env=ENVIRONMENT)  # noqa: S603
    return time.perf_counter() - start


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=31)
    rounds = parser.parse_args().rounds
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(rounds):
        for name, command in COMMANDS.items():
            times[name].append(seconds(command))
    bare = statistics.median(times["bare python"])
    for name, found in times.items():
        median = statistics.median(found)
        text = f"{name:12} {median * 1e3:6.0f} ms"
        if name != "bare python":
            text += f", {(median - bare) * 1e3:.0f} ms over bare"
        print(text)


if __name__ == "__main__":
    main()
