"""The public names of `buoy.jax`, and what importing it loads."""

import subprocess
import sys

import buoy.jax

PUBLIC = """
BuoyWarning Dtypes Feed IntegerLeafError LossError LossScaledState MasterState
MissingAxisError NoScaleError NoStepError OptionError
SeveralScalesError StructureError Stuck StuckError StuckWarning UnboundAxisError
UnhashablePolicyError applied_of cast last_step loss_scaled master_weights scale_of
value_and_grad
""".split()


def test_public_names_are_frozen():
    """The surface changes only together with a line in CHANGELOG.md."""
    assert PUBLIC == buoy.jax.__all__
    for name in PUBLIC:
        assert getattr(buoy.jax, name).__doc__, name


def test_importing_it_loads_neither_torch_nor_flax():
    """JAX and optax are enough."""
    code = "import buoy.jax, sys; print(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    loaded = {name.split(".")[0] for name in run.stdout.split()}

    assert not loaded & {"torch", "flax", "equinox", "orbax", "jmp"}
