"""Keras' own tests, which ship in its wheel, pass with our optimizer in its place."""

import subprocess
import sys
from pathlib import Path

from tests.keras.nets import BACKEND

PASSED = {"tensorflow": 22, "jax": 21, "torch": 29}  # as with Keras' own
# The cases of other files that make or name the optimizer.
SPARSE = "optimizers/optimizer_sparse_test.py"
AVERAGES = "callbacks/swap_ema_weights_test.py"
OTHERS = ["optimizers/multi_optimizer_test.py", "trainers/trainer_test.py"]
CASES = (
    "loss_scale_optimizer or blocks_nested or adds_loss_scaling or prevents_underflow"
)


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
    """Optimizers of several optimizers, `compile`, sparse gradients and averages.

    On torch Keras has no sparse gradients and skips FP16; its test of averages passes,
    but compiles for a minute, so that it is left out there.
    """
    files, count = OTHERS, 3
    if BACKEND != "torch":
        files, count = [*OTHERS, SPARSE, AVERAGES], 7
    told = run(tmp_path, *files, "-k", CASES)

    assert told.startswith(f"{count} passed"), told
