"""The examples with training libraries run as their texts say, with fewer steps."""

import runpy
import sys
from pathlib import Path

import pytest

import buoy.trace

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("name", "trace", "switch"),
    [
        ("grpo_trl", "grpo.buoy", ["--bf16"]),
        ("transformers_trainer", "transformers.buoy", ["--bf16"]),
        ("lightning_trainer", "lightning.buoy", ["--precision", "bf16-mixed"]),
    ],
)
def test_an_example_records_its_run(name, trace, switch, tmp_path, monkeypatch, capsys):
    """In FP16; in BF16 it has no scale, and records nothing."""
    monkeypatch.chdir(tmp_path)
    script = str(EXAMPLES / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [script, "--steps", "5", *switch])
    runpy.run_path(script, run_name="__main__")
    assert "scale" not in capsys.readouterr().out
    assert not (tmp_path / trace).exists()

    monkeypatch.setattr(sys, "argv", [script, "--steps", "5"])
    runpy.run_path(script, run_name="__main__")
    assert "scale" in capsys.readouterr().out
    rows = buoy.trace.load(tmp_path / trace).rows
    assert len(rows) == 5
    assert rows[-1].scale > rows[0].scale
