"""One history, one trajectory: Keras on each backend does what the core does."""

import keras
import numpy as np
import pytest

import buoy
from tests.keras.nets import BACKEND, scaled
from tests.test_trajectory import (
    LARGEST,
    POLICIES,
    SMALLEST,
    SPREAD,
    history,
    run_plain,
)

STEPS = 160
NAMES = ["headroom", "backoff", "static", "apex, static", "none", "keras", "tf"]
NAMES += ["torch", "flax", "megatron", "nemo"]


def in_range(scaled_grads):
    """Give numbers as a format of FP16's range holds them."""
    size = keras.ops.abs(scaled_grads)
    kept = keras.ops.where(size < SMALLEST, 0.0 * scaled_grads, scaled_grads)
    return keras.ops.where(size > LARGEST, np.inf, kept)


def run_keras(events, policy):
    """Apply the gradients of a history, in graphs where the backend has them."""
    optimizer = scaled(policy, keras.optimizers.SGD(0.0))
    weight = keras.Variable(np.zeros(len(SPREAD), "float32"))
    optimizer.build([weight])
    step = {"tensorflow": _tensorflow, "jax": _jax, "torch": _torch}[BACKEND]
    take, ran = step(optimizer, weight), []
    for event in events:
        take(np.asarray(event.grads, "float32"), np.float32(event.loss))
        last = optimizer.rows()[-1]
        ran.append((last.scale, last.applied))
    assert np.isfinite(keras.ops.convert_to_numpy(weight)).all()
    return ran


def _torch(optimizer, weight):
    def take(grads, loss):
        optimizer.scale_loss(keras.ops.convert_to_tensor(loss))
        scaled_grads = keras.ops.convert_to_tensor(grads) * optimizer.dynamic_scale
        optimizer.apply([in_range(scaled_grads)], [weight])

    return take


def _tensorflow(optimizer, weight):
    import tensorflow as tf

    return tf.function(_torch(optimizer, weight))


def _jax(optimizer, weight):
    import jax

    names = [variable.name for variable in optimizer.variables]
    place = names.index("dynamic_scale")

    @jax.jit
    def step(own, value, grads):
        scale = own[place]
        return optimizer.stateless_apply(own, [in_range(grads * scale)], [value])

    def take(grads, loss):
        own = [v.value for v in optimizer.variables]
        (value,), own = step(own, weight.value, grads)
        weight.assign(value)
        for variable, new in zip(optimizer.variables, own, strict=True):
            variable.assign(new)

    return take


@pytest.mark.parametrize("name", NAMES)
def test_one_history_makes_one_trajectory(name):
    """Step for step; `fit` on JAX cannot look ahead, so losses are hidden there."""
    policy, events = POLICIES[name], history()[:STEPS]
    seen = events
    if BACKEND == "jax":
        seen = [event._replace(loss=None) for event in events]

    assert run_keras(events, policy) == run_plain(seen, policy)


@pytest.mark.skipif(BACKEND == "torch", reason="torch has float64")
@pytest.mark.parametrize("name", ["lognormal", "apex", "deepspeed", "paddle"])
def test_policies_in_float64_are_refused(name):
    """With the reason; those in float32 are not."""
    if POLICIES[name].precision == "float64":
        with pytest.raises(buoy.PolicyError, match="float64"):
            scaled(POLICIES[name])
    else:
        assert scaled(POLICIES[name])
