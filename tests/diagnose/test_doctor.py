"""Each misuse gives exactly its finding, and correct scripts give none."""

from pathlib import Path

import pytest

from buoy.diagnose import examine

SCRIPTS = Path(__file__).parent / "scripts"
BAD = sorted(path.stem.removeprefix("bad_") for path in SCRIPTS.glob("bad_*.py"))
GOOD = sorted(path.stem for path in SCRIPTS.glob("good_*.py"))

pytestmark = pytest.mark.filterwarnings("ignore")  # the scripts' own


@pytest.mark.parametrize("code", BAD)
def test_a_misuse_gives_exactly_its_finding(code):
    """One script per misuse."""
    seen = examine(str(SCRIPTS / f"bad_{code}.py"))

    assert [code] == [finding.code for finding in seen.findings]


@pytest.mark.parametrize("script", GOOD)
def test_a_correct_script_gives_none(script):
    """Loops of different style."""
    seen = examine(str(SCRIPTS / f"{script}.py"))

    assert [] == seen.findings
    assert seen.error is None
    assert seen.facts.steps >= 6
