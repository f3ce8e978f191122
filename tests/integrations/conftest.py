"""Collected only where the training libraries are: `make test-integrations`."""

import sys
from importlib.util import find_spec
from pathlib import Path

collect_ignore_glob = [] if find_spec("accelerate") else ["test_*.py"]
sys.path.insert(0, str(Path(__file__).parent))
