"""The examples that need no library of others run as their texts say."""

import os
import re
import runpy
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


@pytest.mark.long
def test_local_scales_reach_the_loss_of_fp32(tmp_path):
    """And no other scale does: the figures of the docs."""
    printed = printed_by(tmp_path, "local_scales.py")

    single, best, torchs, headroom, local = map(
        float, re.findall(r"loss ([\d.]+)", printed)
    )
    assert abs(local / single - 1) < 0.02
    assert min(best, torchs, headroom) > 2 * single
    page = EXAMPLES.parent / "docs" / "wrong" / "every-step-skipped.md"
    found = re.findall(r"FP(?:32|16).* \| ([\d.]+) \|", page.read_text())
    assert [single, best, torchs, headroom, local] == pytest.approx(
        list(map(float, found)), rel=0.01
    )


def test_local_scales_leave_gradients_as_they_are():
    """Whatever the scales, bit for bit; and they are saved with the model."""
    torch = pytest.importorskip("torch")
    example = runpy.run_path(str(EXAMPLES / "local_scales.py"))
    torch.manual_seed(0)
    blocks = [torch.nn.Linear(6, 6) for _ in range(4)]
    x = torch.randn(5, 6)

    def gradients(model):
        model.zero_grad()
        model(x).square().mean().backward()
        return [param.grad.clone() for param in model.parameters()]

    wanted = gradients(torch.nn.Sequential(*blocks))
    local = example["LocalScales"](*blocks)
    local.exponents = [-20, 7, 13, -2]
    found = gradients(local)
    assert all(map(torch.equal, wanted, found))
    local.follow()
    assert [-20, 7, 13, -2] != local.exponents
    assert all(map(torch.equal, wanted, gradients(local)))

    other = example["LocalScales"](*(torch.nn.Linear(6, 6) for _ in range(4)))
    other.load_state_dict(local.state_dict())
    assert (local.exponents, local.levels) == (other.exponents, other.levels)


def test_local_scales_take_the_gain_away_and_nothing_else():
    """FP16 with a gain of 8 and local scales is FP16 without the gain."""
    pytest.importorskip("torch")
    example = runpy.run_path(str(EXAMPLES / "local_scales.py"))
    train = example["train"]
    steep = train(20, local=True)
    train.__globals__["GAIN"] = 1.0
    assert train(20) == steep
