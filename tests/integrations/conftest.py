"""Collected only where the training libraries are: `make test-integrations`."""

import sys
from importlib.util import find_spec
from pathlib import Path

# Run in processes of their own.
SCRIPTS = ["ddp.py", "recipes.py", "verl_engine.py", "zero.py"]
collect_ignore_glob = SCRIPTS if find_spec("accelerate") else ["*.py"]
sys.path.insert(0, str(Path(__file__).parent))
