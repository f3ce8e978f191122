"""A front end without its framework says what to install."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("front_end", "missing"),
    [
        ("torch", "torch"),
        ("jax", "jax"),
        ("jax", "optax"),
        ("keras", "keras"),
        ("tensorflow", "tensorflow"),
    ],
)
def test_a_front_end_without_its_framework_says_what_to_install(front_end, missing):
    """An `ImportError` of ours, with the extra."""
    code = f"import sys; sys.modules[{missing!r}] = None; import buoy.{front_end}"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )

    assert run.returncode
    assert f"MissingBackendError: `buoy.{front_end}` needs" in run.stderr
    assert f"pip install 'buoy-amp[{front_end}]'" in run.stderr
