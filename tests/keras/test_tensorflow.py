"""TensorFlow: tapes, graphs, XLA, replicas, checkpoints, and loops without Keras."""

import math
from contextlib import nullcontext

import keras
import numpy as np
import pytest

import buoy
from tests.keras.nets import BACKEND, data, net, scaled, weights, without
from tests.told import FINITE, NOT_FINITE, UNKNOWN, Told

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

    together, alone = (model.optimizer.rows() for model in made)
    assert {row.norm for row in together} == {None}  # the sum is not made yet
    assert all(row.norm > 0.0 for row in alone)
    rows = [[row.applied for row in rows] for rows in (together, alone)]
    assert rows[0] == rows[1]
    assert rows[0].count(False) == 1
    for a, b in zip(weights(made[0]), weights(made[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def told_of(optimizer):
    """Return what the policy was told of the last step, on each replica."""
    (told,) = (v for v in optimizer.variables if v.name == "policy_told")
    return {float(one) for one in getattr(told.value, "values", [told.value])}


@pytest.mark.parametrize("how", ["eager", "graph"])
def test_replicas_are_told_of_every_loss(strategy, how):
    """A loss that is not finite on one replica was not finite for all."""
    with strategy.scope():
        optimizer = scaled(Told())
        weight = keras.Variable([1.0, 1.0], name="w")
        optimizer.build([weight])

    def step(bad, scale_it):
        def one():
            rank = tf.distribute.get_replica_context().replica_id_in_sync_group
            spoiled = tf.cast(rank, tf.int32) == bad
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weight) * tf.where(spoiled, math.inf, 1.0)
                if scale_it:
                    loss = optimizer.scale_loss(loss)
            optimizer.apply(tape.gradient(loss, [weight]), [weight])

        strategy.run(one)

    run, told = compiled(step, how), []
    for bad in (-1, 0, 1, -1):
        run(tf.constant(bad), True)
        told.append(told_of(optimizer))
    run(tf.constant(-1), False)

    assert told == [{FINITE}, {NOT_FINITE}, {NOT_FINITE}, {FINITE}]
    assert told_of(optimizer) == {UNKNOWN}


def test_fit_under_a_strategy_tells_of_every_loss(strategy):
    """The last batch is bad, in the half of the second replica."""
    x, y = data()
    with strategy.scope():
        model = net()
        model.compile(scaled(Told(), "adam"), "mse")
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    assert told_of(model.optimizer) == {FINITE}

    y[-1] = math.nan
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    assert told_of(model.optimizer) == {NOT_FINITE}


@pytest.mark.parametrize("how", ["eager", "graph", "xla"])
def test_a_scaler_without_keras_tells_of_its_losses(how):
    """Of all losses of a step; of none if `scale` is not called with the step."""
    from buoy.tensorflow import LossScaler

    scaler, weight = LossScaler(Told()), tf.Variable([1.0])

    def step(*xs):
        with tf.GradientTape() as tape:
            losses = [scaler.scale(weight * x) for x in xs]
            loss = tf.add_n([weight, *losses])
        return scaler.apply(lambda pairs: None, tape.gradient(loss, [weight]), [weight])

    run, told = compiled(step, how), []
    for xs in ([1.0, 3e38], [1.0, math.inf], [math.nan, 1.0], [1.0, 1.0], []):
        run(*map(tf.constant, xs))
        told.append(float(scaler._state["told"]))
    assert told == [FINITE, NOT_FINITE, NOT_FINITE, FINITE, UNKNOWN]

    tf.function(scaler.scale)(tf.constant(math.nan))
    run()
    assert float(scaler._state["told"]) == UNKNOWN


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


def test_a_scaler_unscales_sparse_gradients_and_leaves_out_none():
    """What comes back has the form of what was given."""
    from buoy.tensorflow import LossScaler

    scaler = LossScaler()
    rows = tf.IndexedSlices(tf.fill((1, 2), 4.0), tf.constant([3]), (5, 2))
    sparse, nothing = scaler.unscale([rows, None])

    scale = float(scaler.current_scale)
    assert [[4.0 / scale] * 2] == sparse.values.numpy().tolist()
    assert [3] == sparse.indices.numpy().tolist()
    assert nothing is None


def test_a_scaler_without_keras_refuses_replicas(strategy):
    """Each would decide for itself."""
    from buoy.tensorflow import LossScaler, OptionError

    scaler = LossScaler()
    with strategy.scope(), pytest.raises(OptionError, match="works on one replica"):
        scaler.apply(lambda pairs: None, [tf.ones(2)], [tf.ones(2)])


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


@pytest.mark.parametrize("how", ["eager", "graph", "xla"])
def test_loops_of_tf_keras_2(how):
    """`get_scaled_loss`, `get_unscaled_gradients`, clipping by hand."""
    optimizer = scaled(initial_scale=8.0)
    weight = keras.Variable([1.0, 1.0])
    optimizer.build([weight])

    def step(x):
        with tf.GradientTape() as tape:
            loss = optimizer.get_scaled_loss(tf.reduce_sum(weight * x))
        grads = optimizer.get_unscaled_gradients(tape.gradient(loss, [weight]))
        clipped, norm = tf.clip_by_global_norm(grads, 5.0)
        optimizer.apply_gradients(zip(clipped, [weight], strict=True))
        return norm

    run = compiled(step, how)

    assert float(run(tf.constant([6.0, 8.0]))) == 10.0
    run(tf.constant([1.0, math.inf]))
    assert weight.numpy().tolist() == [-0.5, -1.0]  # 1 - 0.5 x (3, 4)
    assert [row.applied for row in optimizer.rows()] == [True, False]
    assert optimizer.scale == 4.0


def test_an_optimizer_is_saved_by_checkpoints(tmp_path):
    """With the model; both go on from there."""
    x, y = data(spoil={3})
    model, again = net(), net()
    for one in (model, again):
        one.compile(scaled("headroom", "adam"), "mse")
        one.optimizer.build(one.trainable_variables)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    saved = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = saved.save(str(tmp_path / "c"))
    tf.train.Checkpoint(model=again, optimizer=again.optimizer).restore(path)

    assert again.optimizer.scale == model.optimizer.scale
    assert len(again.optimizer.rows()) == 12
    for one in (model, again):
        one.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    for a, b in zip(weights(model), weights(again), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("how", ["eager", "graph"])
def test_a_scaler_for_tf_keras(how, tmp_path):
    """An FP16 model and an optimizer of tf_keras; a checkpoint has all of it."""
    tf_keras = pytest.importorskip("tf_keras")
    from buoy.tensorflow import LossScaler

    def make():
        tf_keras.utils.set_random_seed(1)
        half = {"dtype": tf_keras.mixed_precision.Policy("mixed_float16")}
        model = tf_keras.Sequential(
            [
                tf_keras.layers.Dense(8, "tanh", input_shape=(4,), **half),
                tf_keras.layers.Dense(1, **half),
            ]
        )
        optimizer = tf_keras.optimizers.Adam(0.01, global_clipnorm=1.0)
        optimizer.build(model.trainable_variables)
        return model, optimizer, LossScaler(buoy.Static(init_scale=64.0))

    def train(model, optimizer, scaler, arrays):
        def step(x, y):
            with tf.GradientTape() as tape:
                wide = tf.cast(model(x, training=True), tf.float32)
                loss = scaler.scale(tf.reduce_mean((wide - y) ** 2))
            variables = model.trainable_variables
            return scaler.apply(optimizer, tape.gradient(loss, variables), variables)

        run = compiled(step, how)
        batches = zip(*(np.split(a, len(a) // 8) for a in arrays), strict=True)
        return [bool(run(tf.constant(x), tf.constant(y))) for x, y in batches]

    spoiled, clean, again = make(), make(), make()
    applied = train(*spoiled, data(spoil={3, 7}))
    assert [i for i, one in enumerate(applied) if not one] == [3, 7]
    train(*clean, without({3, 7}))
    names = ("model", "optimizer", "scaler")
    saved = tf.train.Checkpoint(**dict(zip(names, spoiled, strict=True)))
    path = saved.save(str(tmp_path / "c"))
    tf.train.Checkpoint(**dict(zip(names, again, strict=True))).restore(path)

    assert int(spoiled[1].iterations) == 10
    assert again[2].rows() == spoiled[2].rows()
    for made in (clean, again):
        for a, b in zip(spoiled[0].variables, made[0].variables, strict=True):
            assert np.array_equal(a.numpy(), b.numpy())
    for made in (spoiled, again):
        train(*made, data(spoil={2}))
    for a, b in zip(spoiled[0].variables, again[0].variables, strict=True):
        assert np.array_equal(a.numpy(), b.numpy())
