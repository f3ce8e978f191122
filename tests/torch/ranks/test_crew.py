"""A crew survives one crash of native code, and reports a crash that comes again."""

import os
import signal
from pathlib import Path

import pytest
from crew import Crew, CrewError

pytestmark = pytest.mark.slow  # starts processes


def crash_once(marker: str) -> str:
    """Abort in the first call."""
    if not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGABRT)
    return "done"


def crash() -> None:
    """Abort."""
    os.kill(os.getpid(), signal.SIGABRT)


@pytest.fixture
def crew():
    """One process."""
    one = Crew(1)
    yield one
    one.close()


def test_a_rare_crash_is_repeated_with_a_warning(crew, tmp_path):
    with pytest.warns(UserWarning, match="a rank crashed in crash_once"):
        found = crew.run(crash_once, str(tmp_path / "marker"))
    assert found == ["done"]


def test_a_crash_that_comes_again_is_an_error(crew):
    with (
        pytest.warns(UserWarning, match="a rank crashed"),
        pytest.raises(CrewError, match=f"exit code -{signal.SIGABRT.value}"),
    ):
        crew.run(crash)
