"""The optimizer cannot destroy weights, and a skipped step changes nothing else."""

import math

import keras
import numpy as np
import pytest

import buoy
from buoy.keras import CallOrderError, LossScaleOptimizer, OptionError
from tests.keras.nets import (
    BACKEND,
    Loop,
    data,
    fitted,
    net,
    scaled,
    weights,
    without,
)

SGD = keras.optimizers.SGD


def test_a_scale_that_only_falls_stays_positive():
    """Where Keras' own reaches 0 and then writes NaN, the scale stops at its floor."""
    loop = Loop(scaled())
    for _ in range(60):
        loop.apply([math.inf, 1.0, 1.0])

    assert loop.optimizer.scale == 2.0**-24
    loop.apply(np.full(3, 2.0**-24))
    assert loop.weight.tolist() == [0.5] * 3


def test_a_scale_that_only_grows_stays_finite():
    """Where Keras' own reaches inf, the scale stops at its ceiling."""
    loop = Loop(scaled(initial_scale=2.0**60, dynamic_growth_steps=1))
    for _ in range(10):
        loop.apply([0.0, 0.0, 0.0])

    assert loop.optimizer.scale == 2.0**64
    assert loop.optimizer.last_step.applied


def test_a_gradient_that_overflows_when_divided_is_skipped():
    """Finite as it comes, infinite once unscaled: nothing reaches the weights."""
    loop = Loop(scaled(buoy.Static(init_scale=2.0**-20)))
    loop.apply([3e38, 1.0, 1.0])

    assert loop.weight.tolist() == [1.0] * 3
    assert not loop.optimizer.last_step.applied
    assert loop.optimizer.last_step.offenders == (loop.variable.path,)


@pytest.mark.parametrize("kind", ["clipnorm", "global_clipnorm"])
def test_a_norm_that_keras_cannot_compute_is_no_step(kind):
    """Each gradient is finite; clipped by an infinite norm, Keras' are NaN or 0."""
    loop = Loop(scaled(inner=SGD(0.5, **{kind: 1.0}), initial_scale=2.0**4))
    loop.apply(np.full(3, 2.0**70))  # 2^66 unscaled: squares are beyond float32

    assert loop.weight.tolist() == [1.0] * 3
    assert not loop.optimizer.last_step.applied
    loop.apply(np.full(3, 2.0**60))
    assert loop.optimizer.last_step.applied
    assert loop.weight.tolist() == pytest.approx([1.0 - 0.5 / math.sqrt(3.0)] * 3)


def test_a_norm_beyond_float32_matters_only_to_clipping():
    """Without clipping, finite gradients are applied."""
    loop = Loop(scaled(inner=SGD(2.0**-70), initial_scale=2.0**4))
    loop.apply(np.full(3, 2.0**70))

    assert loop.weight.tolist() == [1.0 - 2.0**-4] * 3


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_skipped_step_changes_only_the_scale(bad):
    """Momentum, iterations, averages and accumulators stay as they were."""
    inner = SGD(0.5, momentum=0.9, use_ema=True, global_clipnorm=1.0, weight_decay=0.1)
    loop = Loop(scaled(inner=inner))
    scale = loop.optimizer.scale
    loop.apply([scale, -scale, 0.0])
    before = [keras.ops.convert_to_numpy(v) for v in inner.variables]
    kept = loop.weight
    loop.apply([1.0, bad, 1.0])

    assert loop.optimizer.scale == scale / 2
    assert kept.tolist() == loop.weight.tolist()
    for old, variable in zip(before, inner.variables, strict=True):
        assert np.array_equal(old, keras.ops.convert_to_numpy(variable))


def test_accumulation_loses_only_the_batch_that_overflowed():
    """Three finite batches and one that is not make the updates of the three."""
    made = []
    for sequence in ([1.0, math.inf, 3.0, 5.0], [1.0, 3.0, 5.0]):
        inner = SGD(0.5, gradient_accumulation_steps=2)
        loop = Loop(scaled(buoy.Static(init_scale=4.0), inner))
        for grad in sequence:
            loop.apply([4.0 * grad] * 3)
        made.append(loop.weight.tolist())

    assert made[0] == made[1] == [0.0] * 3  # 1 - 0.5 x (1 + 3) / 2


@pytest.mark.parametrize("policy", [None, "headroom"])
def test_fit_skips_spoiled_batches_and_nothing_else(policy):
    """The weights are those of a run that never saw those batches."""
    # A fixed scale: otherwise rounding in FP16 differs after the skips.
    rule = buoy.Static(init_scale=64.0) if policy is None else policy
    spoiled = fitted(scaled(rule, "adam"), data(spoil={3, 7}))
    clean = fitted(scaled(rule, "adam"), without({3, 7}))

    skipped = [row.step for row in spoiled.optimizer.rows() if not row.applied]
    assert skipped == [3, 7]
    assert int(keras.ops.convert_to_numpy(spoiled.optimizer.iterations)) == 10
    for one, other in zip(weights(spoiled), weights(clean), strict=True):
        np.testing.assert_allclose(one, other, atol=0.0 if policy is None else 2e-3)


def test_the_log_has_what_became_of_the_last_steps():
    """Scale, next scale, norm, largest gradient and culprits, of unscaled gradients."""
    loop = Loop(scaled(initial_scale=4.0))
    loop.apply([12.0, 0.0, 16.0])
    loop.apply([1.0, math.inf, 0.0])
    first, second = loop.optimizer.rows()

    assert (first.step, first.scale, first.next_scale) == (0, 4.0, 4.0)
    assert (first.norm, first.amax, first.verdict) == (5.0, 4.0, "applied")
    assert (second.scale, second.next_scale) == (4.0, 2.0)
    assert (second.verdict, second.offenders) == ("scale_too_high", ("w",))
    assert second == loop.optimizer.last_step


def test_poisoned_weights_are_named():
    """A skip because of weights that are NaN already is no matter of the scale."""
    loop = Loop(scaled())
    loop.variable.assign([math.nan, 1.0, 1.0])
    loop.apply([math.nan] * 3)

    assert loop.optimizer.last_step.verdict == "poisoned"


@pytest.mark.filterwarnings("ignore:(?s).*Gradients do not exist")
def test_eager_apply_works_on_every_backend():
    """Also on JAX, where Keras' own raises; frozen variables have no gradient."""
    optimizer = scaled(initial_scale=2.0)
    used, frozen = keras.Variable([1.0], name="a"), keras.Variable([1.0], name="b")
    optimizer.build([used, frozen])
    optimizer.apply([keras.ops.array([4.0]), None], [used, frozen])
    optimizer.apply([keras.ops.array([math.inf]), None], [used, frozen])

    assert float(used.numpy()[0]) == 0.0
    assert float(frozen.numpy()[0]) == 1.0
    assert optimizer.last_step.offenders == ("a",)


def test_unscaled_gradients_are_not_divided_again():
    """Loops of tf.keras 2: scale, unscale, clip by hand, apply."""
    optimizer = scaled(initial_scale=8.0)
    weight = keras.Variable([1.0, 1.0])
    optimizer.build([weight])
    assert float(optimizer.get_scaled_loss(2.0)) == 16.0
    assert float(optimizer.get_scaled_loss(lambda: 2.0)()) == 16.0
    grads = optimizer.get_unscaled_gradients([keras.ops.array([8.0, -16.0]), None][:1])
    assert keras.ops.convert_to_numpy(grads[0]).tolist() == [1.0, -2.0]

    optimizer.apply([keras.ops.clip(grads[0], -1.0, 1.0)], [weight])
    assert weight.numpy().tolist() == [0.5, 1.5]
    assert optimizer.last_step.amax == 1.0

    scaled_again = [keras.ops.array([8.0, 8.0])]
    optimizer.get_unscaled_gradients(scaled_again)
    optimizer.apply(scaled_again, [weight])  # the very ones: they carry the scale
    assert weight.numpy().tolist() == [0.0, 1.0]


def test_an_fp16_loss_keeps_its_cotangent_finite():
    """A policy that measures never scales an FP16 loss by more than 2^15."""
    optimizer = scaled(buoy.Headroom(init_scale=2.0**30))
    weight = keras.Variable([1.0])
    optimizer.build([weight])
    half = keras.ops.cast(keras.ops.array(1.0), "float16")

    assert float(optimizer.scale_loss(half)) == 2.0**15
    optimizer.apply([keras.ops.array([2.0**15])], [weight])
    assert weight.numpy().tolist() == [0.5]
    assert optimizer.last_step.scale == 2.0**15


def test_fp16_variables_are_refused_by_name():
    """Updates would be rounded away; the message says what to use."""
    with pytest.raises(OptionError, match="`small`.*mixed_float16"):
        scaled().build([keras.Variable([1.0], dtype="float16", name="small")])


def test_misuse_is_explained():
    """Two rules at once, steps that were never taken, policies in float64."""
    with pytest.raises(OptionError, match="initial_scale.*policy"):
        LossScaleOptimizer("sgd", 4.0, policy="headroom")
    with pytest.raises(CallOrderError, match="No step"):
        _ = scaled().last_step
    with pytest.raises(ValueError, match="must be built"):
        scaled().stateless_apply([], [], [])
    if BACKEND != "torch":
        with pytest.raises(buoy.PolicyError, match="float64"):
            scaled("apex")
    else:
        assert scaled("apex").policy.precision == "float64"


def test_configurations_come_back():
    """With a policy and without; names of policies and optimizers will do."""
    for made in (scaled(), scaled("headroom"), scaled(buoy.Backoff(hysteresis=2))):
        again = LossScaleOptimizer.from_config(made.get_config())
        assert (again.policy, again.initial_scale) == (made.policy, made.initial_scale)
        assert again.get_config() == made.get_config()
    assert len(scaled().get_config()) == 4


def test_a_saved_model_goes_on_where_it_was(tmp_path):
    """A `.keras` file has the policy, its state and the log."""
    x, y = data(spoil={3})
    model = fitted(scaled("headroom", "adam"), (x, y))
    model.save(tmp_path / "m.keras")
    again = keras.saving.load_model(tmp_path / "m.keras")

    assert type(again.optimizer) is LossScaleOptimizer
    for one, other in zip(again.optimizer.rows(), model.optimizer.rows(), strict=True):
        assert repr(one._replace(offenders=())) == repr(other._replace(offenders=()))
    for one in (model, again):
        one.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    for a, b in zip(weights(model), weights(again), strict=True):
        assert np.array_equal(a, b)
    assert model.optimizer.scale == again.optimizer.scale


def test_models_of_keras_own_optimizer_are_adopted(tmp_path):
    """Its file loads, and `adopt` keeps scale, clean steps and momentum."""
    stock = keras.optimizers.LossScaleOptimizer(SGD(0.1, momentum=0.9), 2.0**10)
    fitted(stock, data()).save(tmp_path / "m.keras")
    model = keras.saving.load_model(tmp_path / "m.keras")
    inner = model.optimizer.inner_optimizer
    ours = LossScaleOptimizer.adopt(model)

    assert ours is model.optimizer
    assert ours.inner_optimizer is inner
    assert (ours.scale, int(ours.step_counter.numpy())) == (2.0**10, 12)
    assert LossScaleOptimizer.adopt(model) is ours
    before = weights(model)
    model.fit(*data(spoil={1}), batch_size=8, verbose=0, shuffle=False)
    assert ours.rows()[1].applied is False
    assert not np.array_equal(before[0], weights(model)[0])
    with pytest.raises(OptionError, match="no optimizer to adopt"):
        LossScaleOptimizer.adopt(net())


def test_use_makes_compile_take_ours():
    """Only where Keras would wrap, and only while it is in use."""
    with buoy.keras.use(policy="headroom"):
        keras.config.set_dtype_policy("mixed_float16")
        half = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        half.compile("sgd", "mse")
        own = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        own.compile(keras.optimizers.LossScaleOptimizer(SGD()), "mse")
        keras.config.set_dtype_policy("float32")
        wide = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        wide.compile("sgd", "mse")

    assert type(half.optimizer) is LossScaleOptimizer
    assert isinstance(half.optimizer.policy, buoy.Headroom)
    assert type(own.optimizer) is keras.optimizers.LossScaleOptimizer
    assert isinstance(wide.optimizer, SGD)
    assert "buoy" not in keras.Model.compile.__module__


def test_the_last_use_counts():
    """Also if they are undone in another order."""
    keras.config.set_dtype_policy("mixed_float16")

    def compiled():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model.optimizer

    try:
        first, last = buoy.keras.use("headroom"), buoy.keras.use(buoy.Static())
        assert compiled().policy == buoy.Static()
        first.undo()
        assert compiled().policy == buoy.Static()
        last.undo()
        assert type(compiled()) is keras.optimizers.LossScaleOptimizer
    finally:
        keras.config.set_dtype_policy("float32")


def test_a_scale_cannot_be_set_before_there_are_variables():
    """The message says which call makes them."""
    with pytest.raises(CallOrderError, match="no variables yet.*optimizer.build"):
        scaled().start_at(8.0)


def test_a_step_without_any_gradient_is_an_error_of_keras():
    """It is not counted as a step."""
    loop = Loop(scaled())
    with pytest.raises(ValueError, match="No gradients"):
        loop.optimizer.apply([None], [loop.variable])

    assert [] == loop.optimizer.rows()
