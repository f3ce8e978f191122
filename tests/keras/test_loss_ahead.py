"""`LossAhead` in Keras: its state in variables, the loss before the backward pass."""

import keras
import numpy as np
import pytest

import buoy
from buoy import LossAhead
from tests.keras.nets import BACKEND, data, fitted, net, scaled, weights

LOSSES = [1.0, 1.0, 1.0, 1024.0, 1.0]


class Blind(buoy.Backoff):
    """A policy that must not be asked to look ahead."""

    def foresee(self, state, loss, *, ops=None):
        raise AssertionError


def steps(optimizer, sizes):
    """Apply gradients of these sizes, with losses as large; return the rows."""
    weight = keras.Variable(np.zeros(2, "float32"))
    optimizer.build([weight])

    def take(size):
        optimizer.scale_loss(size)
        optimizer.apply([size * optimizer.dynamic_scale * keras.ops.ones(2)], [weight])

    if BACKEND == "tensorflow":
        import tensorflow as tf

        take = tf.function(take)
    for size in sizes:
        take(keras.ops.convert_to_tensor(np.float32(size)))
    return optimizer.rows()


@pytest.mark.skipif(BACKEND == "jax", reason="pure functions store no loss")
@pytest.mark.parametrize("inside", ["backoff", "headroom"])
def test_a_loss_that_jumps_lowers_the_scale_of_its_step(inside):
    """And of no other: the policy's own comes back."""
    rows = steps(scaled(LossAhead(inside)), LOSSES)
    used = [row.scale for row in rows]

    assert used[3] <= rows[2].next_scale / 2**10
    assert used[4] == rows[3].next_scale >= used[3]
    assert all(row.applied for row in rows)


def test_a_policy_that_does_not_look_ahead_is_not_asked_to():
    """The rule puts nothing between the loss and its gradients."""
    assert all(row.applied for row in steps(scaled(Blind()), LOSSES))


def test_weights_files_keep_the_state_inside(tmp_path):
    """Every number of it is a variable, and training goes on as if never saved."""
    arrays = data(spoil={3})
    model = fitted(scaled("loss_ahead", "adam"), arrays)
    model.save_weights(tmp_path / "m.weights.h5")
    again = net()
    again.compile(scaled("loss_ahead", "adam"), "mse")
    again.optimizer.build(again.trainable_variables)
    again.load_weights(tmp_path / "m.weights.h5")
    for one in (model, again):
        one.fit(*arrays, batch_size=8, shuffle=False, verbose=0)

    held = [variable.name for variable in again.optimizer.variables]
    assert "policy_inner_scale" in held
    rows = [one.optimizer.rows() for one in (model, again)]
    assert [row[:4] for row in rows[0]] == [row[:4] for row in rows[1]]
    for one, other in zip(weights(model), weights(again), strict=True):
        assert np.array_equal(one, other)


def test_a_model_that_is_saved_whole_has_the_wrapper(tmp_path):
    """Its configuration is the policy's, as text."""
    model = fitted(scaled(LossAhead("backoff", growth_interval=7), "adam"), data())
    model.save(tmp_path / "m.keras")
    again = keras.models.load_model(tmp_path / "m.keras")

    assert LossAhead("backoff", growth_interval=7) == again.optimizer.policy
    assert model.optimizer.scale == again.optimizer.scale


@pytest.mark.skipif(BACKEND != "tensorflow", reason="a `tf.Module`")
def test_the_scaler_without_keras_looks_ahead(tmp_path):
    """And `tf.train.Checkpoint` keeps its state."""
    import tensorflow as tf

    from buoy.tensorflow import LossScaler

    scaler, weight = LossScaler(LossAhead("backoff")), tf.Variable([1.0])
    for size in LOSSES[:4]:
        with tf.GradientTape() as tape:
            loss = scaler.scale(tf.reduce_sum(weight * size))
        grads = tape.gradient(loss, [weight])
        scaler.apply(lambda pairs: None, grads, [weight])
    path = tf.train.Checkpoint(scaler=scaler).write(str(tmp_path / "c"))
    again = LossScaler(LossAhead("backoff"))
    tf.train.Checkpoint(scaler=again).read(path).assert_consumed()

    assert 2.0**6 == scaler.last_step.scale
    assert scaler.rows() == again.rows()
    assert 2.0**16 == float(again.current_scale)
