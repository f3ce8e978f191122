"""What `buoy.diagnose` offers, and what it does not load."""

import subprocess
import sys

import buoy.diagnose

PUBLIC = """
Culprit Doctor Examined ExplainSkips Finding SavedBatch Share Underflow estimate_run
estimate_underflow examine first_nonfinite load_batch rng_state save_batch
""".split()


def test_public_names_are_frozen():
    """They change only together with a line in CHANGELOG.md."""
    assert PUBLIC == buoy.diagnose.__all__
    assert all(getattr(buoy.diagnose, name) is not None for name in PUBLIC)


def test_words_and_estimates_load_no_framework():
    """The report and the command line use them where torch is not installed."""
    code = (
        "import sys, buoy.diagnose as d; d.Culprit; d.estimate_run; d.Underflow;"
        "print('torch' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )

    assert "False\n" == run.stdout
