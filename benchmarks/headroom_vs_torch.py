"""Skips and underflow of Headroom against torch's default, over recorded runs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.headroom.compare import main

if __name__ == "__main__":
    main()
