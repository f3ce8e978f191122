"""Helpers on the path; crews of processes that are always sent home."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from crew import Crew


@pytest.fixture(scope="module")
def crew_of():
    """Give crews by their size, started once per module."""
    crews: dict[int, Crew] = {}

    def get(size: int) -> Crew:
        if size not in crews or not crews[size].alive:
            crews[size] = Crew(size)
        return crews[size]

    yield get
    for crew in crews.values():
        crew.close()
