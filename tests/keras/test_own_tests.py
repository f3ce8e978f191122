"""Keras' own tests, which ship in its wheel, pass with our optimizer in its place."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.keras.nets import BACKEND

PASSED = {"tensorflow": 22, "jax": 21, "torch": 29}  # as with Keras' own
OTHERS = {
    "optimizers/optimizer_sparse_test.py": "loss_scale",
    "optimizers/multi_optimizer_test.py": "loss_scale or nested",
    "trainers/trainer_test.py": "loss_scaling",
}


def run(tmp_path, *arguments):
    """Run Keras' tests; return what pytest says at the end."""
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("own.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout.splitlines()[-1]


def test_the_file_about_the_optimizer_passes(tmp_path):
    """As many tests as with Keras' own; the others are for other backends."""
    told = run(tmp_path, "optimizers/loss_scale_optimizer_test.py")

    assert told.startswith(f"{PASSED[BACKEND]} passed"), told


def test_the_cases_of_other_files_pass(tmp_path):
    """Sparse gradients, optimizers of several optimizers, and `compile`."""
    if BACKEND == "torch":
        pytest.skip("Keras on torch has no sparse gradients; the rest is the same")
    told = run(tmp_path, *OTHERS, "-k", " or ".join(OTHERS.values()))

    assert "failed" not in told
    assert int(told.split()[0]) >= 5, told
