"""One thread, one seed; networks on the path."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)

collect_ignore_glob = ["scripts/*.py"]  # examined, not imported: some fail on purpose


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
