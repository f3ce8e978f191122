"""Run the Ray Train example and look at what it says; `make test-ray` does.

Not collected by pytest: Ray is large, and takes a minute to start.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "ray_train.py"


def main() -> None:
    """Check that both workers skipped what overflowed on one, and hold one scale."""
    quiet = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
        env={**os.environ, **quiet},
    )
    said = re.search(r"applied: (\w+), one scale: \{(.*)\}", done.stdout)
    if said is None or said.group(1) != "False" or "," in said.group(2):
        sys.exit(f"Ray example failed:\n{done.stdout}\n{done.stderr}")
    print(said.group(0))


if __name__ == "__main__":
    main()
