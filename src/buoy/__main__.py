"""Let `python -m buoy` be the command `buoy`."""

import sys

from buoy.cli import main

if __name__ == "__main__":
    sys.exit(main())
