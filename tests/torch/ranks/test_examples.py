"""The examples for torchrun run as they say; Ray's has a target of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import buoy.trace

pytestmark = pytest.mark.slow  # starts processes

ROOT = Path(__file__).parents[3]


def torchrun(folder, name, *arguments):
    """Run an example on two processes.

    Its exit status says nothing: threads of gloo may outlive the interpreter and abort.
    """
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    example = str(ROOT / "examples" / name)
    return subprocess.run(
        [*run, "--nproc-per-node", "2", example, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_the_torchrun_example_runs(tmp_path):
    """Two processes, one scale, and steps that were applied."""
    done = torchrun(tmp_path, "torchrun.py")
    assert "scale_too_high" in done.stdout, done.stderr
    assert re.search(r"step 29: .*, applied", done.stdout), done.stderr
    assert re.search(r"2 ranks end at one scale: \[\d+\.0\]", done.stdout)


@pytest.mark.long
def test_the_example_of_grpo_learns_and_writes_its_report(tmp_path):
    """Two steps per round, of one recorded run."""
    done = torchrun(tmp_path, "grpo_fsdp2.py", "--rounds", "5")

    rewards = [float(one) for one in re.findall(r"reward ([\d.]+)", done.stdout)]
    assert len(rewards) == 2, done.stderr
    assert rewards[1] > rewards[0] + 0.2
    assert len(buoy.trace.load(tmp_path / "grpo.buoy").rows) == 10
    assert "Where the gradients lie" in (tmp_path / "grpo.html").read_text()
