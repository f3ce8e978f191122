"""JAX: `DataParallel` and `ModelParallel` on four host devices, and traced `apply`."""

import os
import subprocess
import sys

import pytest

from tests.keras.nets import BACKEND

pytestmark = pytest.mark.skipif(BACKEND != "jax", reason="of JAX")

SCRIPT = """
import sys
import jax, keras, numpy as np
from tests.keras.nets import data, net, scaled, weights

assert len(jax.devices()) == 4

def run(distribution):
    keras.distribution.set_distribution(distribution)
    model = net("float32")
    model.compile(scaled("headroom", "adam"), "mse")
    model.fit(*data(spoil={3}), batch_size=8, shuffle=False, verbose=0)
    return model

alone = run(None)
if sys.argv[1] == "data":
    split = keras.distribution.DataParallel()
else:
    mesh = keras.distribution.DeviceMesh((2, 2), ["batch", "model"], jax.devices())
    layout = keras.distribution.LayoutMap(mesh)
    layout["first/kernel"] = (None, "model")
    split = keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch")
together = run(split)
rows = [[row.applied for row in m.optimizer.rows()] for m in (alone, together)]
assert rows[0] == rows[1] and rows[0].count(False) == 1, rows
assert alone.optimizer.scale == together.optimizer.scale
for a, b in zip(weights(alone), weights(together)):
    np.testing.assert_allclose(a, b, atol=1e-5)
"""


@pytest.mark.parametrize("kind", ["data", "model"])
def test_four_devices_do_what_one_does(kind):
    """One decision and one scale over all shards."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, kind],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | flags,
    )

    assert done.returncode == 0, done.stderr


def test_apply_inside_a_function_that_jax_traces():
    """In a stateless scope of your own, as base optimizers allow it."""
    import jax
    import keras

    from tests.keras.nets import scaled

    optimizer = scaled(initial_scale=4.0)
    weight = keras.Variable([1.0])
    optimizer.build([weight])

    @jax.jit
    def step(grad):
        with keras.StatelessScope() as scope:
            optimizer.apply([grad], [weight])
        variables = [weight, optimizer.dynamic_scale]
        return [scope.get_current_value(v) for v in variables]

    assert [float(x.reshape(())) for x in step(jax.numpy.array([4.0]))] == [0.5, 4.0]
    assert [float(x.reshape(())) for x in step(jax.numpy.array([jax.numpy.inf]))] == [
        1.0,
        2.0,
    ]
