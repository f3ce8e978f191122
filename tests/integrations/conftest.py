"""Collected only where the training libraries are: `make test-integrations`."""

import sys
from importlib.util import find_spec
from pathlib import Path

SCRIPTS = ["ddp.py", "recipes.py", "zero.py"]  # run in processes of their own
collect_ignore_glob = SCRIPTS if find_spec("accelerate") else ["*.py"]
sys.path.insert(0, str(Path(__file__).parent))
