"""One thread, so that the suite is fair to its neighbours; helpers on the path."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)
collect_ignore = ["contract/apex_scripts"]  # they import apex, and are run without it


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
