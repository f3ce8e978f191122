"""The examples that need no library of others run as their texts say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import buoy.trace

pytestmark = pytest.mark.slow  # starts processes

EXAMPLES = Path(__file__).parents[1] / "examples"


def printed_by(folder, name, *arguments):
    """Run an example in a folder; return what it prints."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert 0 == done.returncode, done.stderr
    return done.stdout


def test_the_loop_learns_only_with_scaling(tmp_path):
    """And what it says to look at is there."""
    printed = printed_by(tmp_path, "pytorch_loop.py", "--steps", "80")

    without, scaled = map(float, re.findall(r"scaling: +([\d.]+)", printed))
    assert scaled < 0.3 * without
    assert 80 == len(buoy.trace.load(tmp_path / "pytorch_loop.buoy").rows)
    assert "Headroom" in (tmp_path / "pytorch_loop.html").read_text()


def test_nnx_learns(tmp_path):
    """From a mean square of the targets of two."""
    printed = printed_by(tmp_path, "flax_nnx.py", "--steps", "60")

    assert float(re.search(r"loss: ([\d.]+)", printed).group(1)) < 0.5
    assert "applied=True" in printed
    assert 60 == len(buoy.trace.load(tmp_path / "flax_nnx.buoy").rows)
    assert "Headroom" in (tmp_path / "flax_nnx.html").read_text()


def test_the_recorded_trace_replays(tmp_path):
    """As the example says."""
    printed_by(tmp_path, "record_trace.py", str(tmp_path / "run.json"))

    trace = buoy.trace.read(tmp_path / "run.json")
    assert 800 == len(trace)
    assert buoy.replay(trace, ["headroom"])[0].skipped < 8
