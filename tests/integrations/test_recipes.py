"""The recipes for other libraries: runs end as without the batches that overflow."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("recipes.py")


@pytest.mark.parametrize(
    "name", ["timm", "ignite", "fastai", "ultralytics", "diffusers"]
)
def test_weights_averages_and_lr_do_not_see_skipped_steps(name, tmp_path):
    """The library alone in a process: torchvision cannot be imported by others here."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), name],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        cwd=tmp_path,
        env={**os.environ, "YOLO_CONFIG_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr[-5000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["apart"] == found["averages"] == 0.0
    assert found["moved"] > 5e-3
    assert found["lr"][0] == found["lr"][1]
    assert found.get("plain", 0.0) <= 1e-3  # from a loop by hand
