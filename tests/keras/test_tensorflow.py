"""TensorFlow: tapes, graphs, XLA, replicas, checkpoints, and loops without Keras."""

import math
from contextlib import nullcontext

import keras
import numpy as np
import pytest

import buoy
from tests.keras.nets import BACKEND, data, net, scaled, weights

pytestmark = pytest.mark.skipif(BACKEND != "tensorflow", reason="of TensorFlow")

tf = pytest.importorskip("tensorflow")


@pytest.fixture(scope="module")
def strategy():
    """Make one of two CPU devices; a second one would mix up their messages."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    halves = [tf.config.LogicalDeviceConfiguration()] * 2
    try:
        tf.config.set_logical_device_configuration(cpu, halves)
    except RuntimeError:
        if len(tf.config.list_logical_devices("CPU")) < 2:
            pytest.skip("TensorFlow has started: run this file first")
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def compiled(function, how):
    """Run eagerly, in a graph or under XLA."""
    if how == "eager":
        return function
    return tf.function(function, jit_compile=how == "xla")


def test_replicas_take_one_decision(strategy):
    """An overflow on one replica skips the step on both; Keras' own sees the first."""
    with strategy.scope():
        optimizer = scaled("headroom", keras.optimizers.SGD(0.5))
        weight = keras.Variable([1.0, 1.0], name="w")
        optimizer.build([weight])

    @tf.function
    def step(bad):
        def one():
            rank = tf.distribute.get_replica_context().replica_id_in_sync_group
            spoiled = tf.cast(rank, tf.int32) == bad
            scale = tf.identity(optimizer.dynamic_scale.value)
            grad = tf.where(spoiled, math.nan, scale) * tf.ones(2)
            optimizer.apply([grad], [weight])

        strategy.run(one)

    for bad in (-1, 0, 1):
        step(tf.constant(bad))

    assert weight.numpy().tolist() == [0.0, 0.0]  # 1 - 0.5 x (1 + 1), once
    assert [row.applied for row in optimizer.rows()] == [True, False, False]
    copies = strategy.experimental_local_results(optimizer.dynamic_scale.value)
    assert len({float(copy) for copy in copies}) == 1
    with strategy.scope(), pytest.raises(ValueError, match="in a replica context"):
        optimizer.apply([tf.ones(2)], [weight])


def test_fit_under_a_strategy_is_fit(strategy):
    """Two replicas of half the batch end where one replica does; skips included."""
    made = []
    for scope in (strategy.scope(), nullcontext()):
        with scope:
            model = net("float32")
            inner = keras.optimizers.SGD(0.01)
            model.compile(scaled(buoy.Static(init_scale=64.0), inner), "mse")
        model.fit(*data(spoil={3}), batch_size=8, shuffle=False, verbose=0)
        made.append(model)

    rows = [[row.applied for row in model.optimizer.rows()] for model in made]
    assert rows[0] == rows[1]
    assert rows[0].count(False) == 1
    for a, b in zip(weights(made[0]), weights(made[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("how", ["eager", "graph", "xla"])
def test_loops_with_a_tape(how):
    """The documented loop; the policy sees the loss, an overflow is skipped."""
    optimizer = scaled("headroom")
    weight = keras.Variable([1.0])
    optimizer.build([weight])

    def step(x):
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_sum(weight * x))
        optimizer.apply(tape.gradient(loss, [weight]), [weight])

    run = compiled(step, how)
    run(tf.constant([1.0]))
    run(tf.constant([math.inf]))

    assert weight.numpy().tolist() == [0.5]
    assert [row.applied for row in optimizer.rows()] == [True, False]
    assert optimizer.rows()[0].loss == 1.0
    assert optimizer.last_step.verdict == "forward_nonfinite"


def test_sparse_gradients_are_checked_and_stay_sparse():
    """Rows of an embedding; an infinite one skips the step."""
    optimizer = scaled(buoy.Static(init_scale=4.0))
    table = keras.Variable(np.ones((5, 2), "float32"))
    optimizer.build([table])
    for value in (4.0, math.inf):
        rows = tf.IndexedSlices(tf.fill((2, 2), value), tf.constant([0, 3]), (5, 2))
        optimizer.apply([rows], [table])

    assert table.numpy()[:, 0].tolist() == [0.5, 1.0, 1.0, 0.5, 1.0]
    assert not optimizer.last_step.applied


@pytest.mark.parametrize("how", ["eager", "graph", "xla"])
def test_a_scaler_without_keras(how):
    """Any function of gradients and variables will do as the optimizer."""
    from buoy.tensorflow import LossScaler

    scaler, weight = LossScaler("headroom"), tf.Variable([1.0])

    def apply(pairs):
        for grad, variable in pairs:
            variable.assign_sub(0.5 * grad)

    def step(x):
        with tf.GradientTape() as tape:
            loss = scaler.scale(tf.reduce_sum(weight * x))
        return scaler.apply(apply, tape.gradient(loss, [weight]), [weight])

    run = compiled(step, how)

    assert bool(run(tf.constant([1.0])))
    assert not bool(run(tf.constant([math.nan])))
    assert weight.numpy().tolist() == [0.5]
    assert [row.applied for row in scaler.rows()] == [True, False]
    assert scaler.last_step.verdict == "forward_nonfinite"


def test_a_scaler_is_saved_by_checkpoints(tmp_path):
    """With its policy's whole state; an overflow after loading goes on from there."""
    from buoy.tensorflow import CallOrderError, LossScaler

    scaler, weight = LossScaler(buoy.Backoff(growth_interval=2)), tf.Variable([1.0])
    optimizer = keras.optimizers.SGD(0.5)
    for grad in (math.inf, 1.0):
        scaler.apply(optimizer, [tf.constant([grad])], [weight])
    path = tf.train.Checkpoint(scaler=scaler).save(str(tmp_path / "c"))
    again = LossScaler(buoy.Backoff(growth_interval=2))
    with pytest.raises(CallOrderError):
        _ = again.last_step
    tf.train.Checkpoint(scaler=again).restore(path).assert_consumed()

    assert again.rows() == scaler.rows()
    again.apply(optimizer, [tf.constant([1.0])], [weight])
    assert float(again.current_scale) == 2.0**16
    with pytest.raises(buoy.PolicyError, match="float64"):
        LossScaler("apex")
    with pytest.raises(CallOrderError, match="No variable"):
        again.apply(optimizer, [None], [weight])
