"""Tests here make gradients by hand: what `loss_scaled` warns of is intended."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    """Let hand-made gradients pass; test_carried.py tests the warning."""
    ignore = "ignore:Nothing in this process has read the scale"
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings(ignore))
