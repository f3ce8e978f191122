"""Every benchmark that the documents quote still runs, here at the smallest size.

A benchmark is the only source of the figures in the documents, and nothing else runs
it: a change of the interface would break it unnoticed.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import buoy

ROOT = Path(__file__).parents[1]
SOURCE = str(Path(buoy.__file__).parents[1])
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
QUOTED = re.compile(r"python (?:benchmarks/(\w+)\.py|-m benchmarks\.([\w.]+))")

TINY = {
    "emulate": ["--width", "8", "--rounds", "1"],
    "import_time": ["--rounds", "1"],
    "jax_step": "--processes 1 --rounds 2 --compile-rounds 1 --width 8 --layers 2 "
    "--batch 2".split(),
    "loss_ahead": ["1"],
    "long_trace": ["--steps", "500"],
    "policy_operations": [],
    "recording": ["--rounds", "1", "--parameters", "10000"],
    "replay": ["500"],
    "rounding": ["--steps", "51", "--seeds", "1"],
    "scale_out": ["--steps", "100"],
    "torch_step": ["--rounds", "1", "--parameters", "10000", "--width", "8"],
}
NEEDS = {
    "emulate": "torch",
    "jax_step": "flax",
    "long_trace": "bokeh",
    "recording": "torch",
    "rounding": "torch",
    "torch_step": "torch",
}
# These have no size; other tests run their parts.
ELSEWHERE = {
    "disagreements": "test_commands.py",
    "headroom.torch_trainings": "test_headroom_trainings.py",
    "headroom.trainings": "test_headroom_trainings.py",
    "headroom.worlds": "test_headroom_worlds.py",
    "headroom_ablation": "test_headroom.py",
    "headroom_vs_torch": "test_headroom.py",
    "peers": "test_site.py",
}


def quoted():
    """List the benchmarks that the documents name, as commands."""
    found = [pair for path in TEXTS for pair in QUOTED.findall(path.read_text())]
    return {file or module for file, module in found}


def test_every_quoted_benchmark_is_run():
    """Here, or by the test file that is named; and each that is listed exists."""
    assert quoted() <= TINY.keys() | ELSEWHERE.keys()
    assert {"torch_step", "jax_step", "headroom.worlds"} <= quoted()
    for name in TINY:
        assert (ROOT / "benchmarks" / f"{name}.py").is_file()
    for name, test in ELSEWHERE.items():
        part = name.replace("_vs_torch", ".compare").replace("_ablation", ".lanes")
        assert part.split(".")[-1] in (ROOT / "tests" / test).read_text()


@pytest.mark.long
@pytest.mark.parametrize("name", TINY)
def test_a_benchmark_runs(name):
    """As the documents call it, it prints something and does not fail."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    if name == "jax_step":
        pytest.importorskip("jmp")
    done = subprocess.run(
        [sys.executable, f"benchmarks/{name}.py", *TINY[name]],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=600,
        env={**os.environ, "PYTHONPATH": SOURCE},
    )

    assert 0 == done.returncode, done.stderr
    assert done.stdout.strip()
    assert "failed" not in done.stdout
