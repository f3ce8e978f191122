"""Run Keras' own tests of its LossScaleOptimizer, with ours in its place."""

import importlib
import os
import sys
from pathlib import Path

import keras
import pytest

from buoy.keras import LossScaleOptimizer

HOMES = (
    "keras.optimizers",
    "keras.src.optimizers",
    "keras.src.optimizers.loss_scale_optimizer",
    "keras.src.trainers.trainer",
)


def main() -> int:
    """Replace the class wherever Keras names it, then run these tests."""
    for module in HOMES:
        importlib.import_module(module).LossScaleOptimizer = LossScaleOptimizer
    root = Path(keras.__file__).parent / "src"
    arguments = [str(root / a) if a.endswith(".py") else a for a in sys.argv[1:]]
    # Not with the settings of a project around the environment: markers are Keras'.
    apart = ["-c", os.devnull, "-p", "no:cacheprovider", "-W", "ignore"]
    return pytest.main(["-q", *apart, *arguments])


if __name__ == "__main__":
    sys.exit(main())
