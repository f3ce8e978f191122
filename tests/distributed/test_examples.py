"""The example for torchrun runs as it says; the one for Ray has a target of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # starts processes

ROOT = Path(__file__).parents[2]


def test_the_torchrun_example_runs():
    """Two processes, one scale, and steps that were applied."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*run, "--nproc-per-node", "2", str(ROOT / "examples" / "torchrun.py")],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )

    # Not the exit status: threads of gloo may outlive the interpreter and abort.
    assert "scale_too_high" in done.stdout, done.stderr
    assert re.search(r"step 29: .*, applied", done.stdout), done.stderr
    assert re.search(r"2 ranks end at one scale: \[\d+\.0\]", done.stdout)
