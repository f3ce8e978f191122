"""`fit` in each mode that a backend has, and what the inner optimizer can do."""

import math
import runpy
from pathlib import Path

import keras
import numpy as np
import pytest

import buoy.keras
from tests.keras.nets import (
    BACKEND,
    BATCH,
    Loop,
    data,
    fitted,
    net,
    scaled,
    weights,
    without,
)

SGD = keras.optimizers.SGD
FIXED = buoy.Static(init_scale=64.0)
MODES = {  # besides the default; torch allows one step per execution
    "tensorflow": [
        {"jit_compile": True},
        {"jit_compile": False, "steps_per_execution": 4},
        {"run_eagerly": True},
    ],
    "jax": [{"steps_per_execution": 4}, {"run_eagerly": True}],
    "torch": [{"jit_compile": True}],
}[BACKEND]


@pytest.fixture(scope="module")
def clean():
    """Train on ten batches; return the weights."""
    return weights(fitted(scaled(FIXED, "adam"), without({3, 7})))


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch.compile, about Keras
def test_every_mode_of_fit_skips_spoiled_batches_alone(mode, clean):
    """The weights are those of a run that never saw those batches."""
    spoiled = fitted(scaled(FIXED, "adam"), data(spoil={3, 7}), **mode)

    skipped = [row.step for row in spoiled.optimizer.rows() if not row.applied]
    assert skipped == [3, 7]
    assert int(_numpy(spoiled.optimizer.iterations)) == 10
    # torch.compile fuses operations, and rounds to FP16 less often.
    bound = 2e-5 if BACKEND == "torch" else 1e-6
    for one, other in zip(weights(spoiled), clean, strict=True):
        np.testing.assert_allclose(one, other, atol=bound)


INNER = {
    "clipnorm": {"clipnorm": 1.0},
    "global_clipnorm": {"global_clipnorm": 1.0},
    "clipvalue": {"clipvalue": 0.5},
    "schedule": {
        "learning_rate": keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
    },
    "average": {"use_ema": True, "ema_overwrite_frequency": 2},
    "accumulation": {"gradient_accumulation_steps": 2},
    "decay": {"weight_decay": 0.1},
}


@pytest.mark.parametrize("name", INNER)
def test_skipped_steps_are_as_if_they_had_not_been(name):
    """Weights and all variables of the inner optimizer, for each of its options."""
    made = []
    for spoil in (True, False):
        inner = SGD(**{"learning_rate": 0.5, "momentum": 0.9} | INNER[name])
        loop = Loop(scaled(buoy.Static(init_scale=8.0), inner))
        for step in range(6):
            if spoil and step in (1, 2, 4):
                loop.apply([math.inf, 1.0, math.nan])
            loop.apply(np.array([8.0, -16.0, 2.0]) * (step + 1))
        held = [keras.ops.convert_to_numpy(v) for v in inner.variables]
        made.append([loop.weight, *held])

    for one, other in zip(*made, strict=True):
        assert np.array_equal(one, other)


def test_weights_files_keep_the_state(tmp_path):
    """A `.weights.h5` file has the scale and the log as well."""
    model = fitted(scaled("headroom", "adam"), data(spoil={3}))
    model.save_weights(tmp_path / "m.weights.h5")
    again = net()
    again.compile(scaled("headroom", "adam"), "mse")
    again.optimizer.build(again.trainable_variables)
    again.load_weights(tmp_path / "m.weights.h5")

    assert again.optimizer.scale == model.optimizer.scale
    assert len(again.optimizer.rows()) == len(model.optimizer.rows()) == 12
    for one, other in zip(weights(again), weights(model), strict=True):
        assert np.array_equal(one, other)


class Stop(keras.callbacks.Callback):
    """Interrupts training after the first epoch."""

    def on_epoch_end(self, epoch, logs=None):
        """Interrupt."""
        raise KeyboardInterrupt


def test_an_interrupted_fit_goes_on_where_it_was(tmp_path):
    """`BackupAndRestore` keeps the scale, the log and the inner optimizer's state."""
    arrays, made = data(spoil={2}), []
    for interrupts in ([], [Stop()]):
        backup = keras.callbacks.BackupAndRestore(tmp_path / str(len(interrupts)))
        if interrupts:
            with pytest.raises(KeyboardInterrupt):
                fitted(scaled("headroom", "adam"), arrays, callbacks=[backup, Stop()])
        again = scaled("headroom", "adam")
        made.append(fitted(again, arrays, callbacks=[backup], epochs=2))

    whole, parts = (model.optimizer for model in made)
    for one, other in zip(whole.rows(), parts.rows(), strict=True):
        assert repr(one._replace(offenders=())) == repr(other._replace(offenders=()))
    assert len(parts.rows()) == 24
    for one, other in zip(*map(weights, made), strict=True):
        assert np.array_equal(one, other)


def test_weights_of_keras_own_optimizer_load(tmp_path):
    """Into a model compiled with ours: the scale, clean steps and momentum go on."""
    stock = keras.optimizers.LossScaleOptimizer(SGD(0.1, momentum=0.9), 2.0**10)
    saved = fitted(stock, data())
    saved.save_weights(tmp_path / "m.weights.h5")
    for policy in (buoy.Backoff(growth_interval=13), "headroom"):
        model = net()
        model.compile(scaled(policy, SGD(0.1, momentum=0.9)), "mse")
        model.optimizer.build(model.trainable_variables)
        model.load_weights(tmp_path / "m.weights.h5")

        assert model.optimizer.scale == 2.0**10
        held = model.optimizer.inner_optimizer.variables
        for one, other in zip(held, stock.inner_optimizer.variables, strict=True):
            assert np.array_equal(_numpy(one), _numpy(other))
        for one, other in zip(weights(model), weights(saved), strict=True):
            assert np.array_equal(one, other)
        x, y = data()
        model.fit(x[:BATCH], y[:BATCH], batch_size=BATCH, verbose=0)
        if policy != "headroom":  # 12 clean steps there, the 13th here
            assert model.optimizer.scale == 2.0**11


@pytest.mark.parametrize("policy", [None, "headroom"])
def test_a_nan_loss_for_400_steps_destroys_nothing(policy):
    """Weights stay as they were, and the scale positive and finite."""
    model = net()
    model.compile(scaled(policy, "adam"), "mse")
    before = weights(model)
    x, y = np.ones((400, 4), "float32"), np.full((400, 1), np.nan, "float32")
    model.fit(x, y, batch_size=1, verbose=0)

    for one, other in zip(before, weights(model), strict=True):
        assert np.array_equal(one, other)
    assert 0.0 < model.optimizer.scale < math.inf
    assert [row.step for row in model.optimizer.rows()] == list(range(336, 400))
    assert not any(row.applied for row in model.optimizer.rows())
    assert int(_numpy(model.optimizer.iterations)) == 0


def test_frozen_layers_stay_as_they_are():
    """A layer that does not train has no part in the check."""
    model = net()
    model.layers[0].trainable = False
    model.compile(scaled(FIXED, "adam"), "mse")
    frozen, trained = (_numpy(layer.kernel) for layer in model.layers)
    model.fit(*data(spoil={3}), batch_size=BATCH, shuffle=False, verbose=0)

    assert np.array_equal(frozen, _numpy(model.layers[0].kernel))
    assert not np.array_equal(trained, _numpy(model.layers[1].kernel))
    rows = model.optimizer.rows()
    assert [row.step for row in rows if not row.applied] == [3]
    assert all("last" in name for name in rows[3].offenders)


def test_embeddings_are_skipped_like_the_rest():
    """Their gradients are sparse on TensorFlow."""
    made = []
    for spoil in (True, False):
        keras.utils.set_random_seed(2)
        model = keras.Sequential(
            [
                keras.Input((2,), dtype="int32"),
                keras.layers.Embedding(9, 4, dtype="mixed_float16"),
                keras.layers.Flatten(),
                keras.layers.Dense(1, dtype="mixed_float16"),
            ]
        )
        model.compile(scaled(FIXED, SGD(0.1)), "mse")
        x = np.arange(12).reshape(6, 2) % 8  # never 8
        y = np.arange(6, dtype="float32")[:, None]
        if spoil:
            x, y = np.insert(x, 2, [7, 1], 0), np.insert(y, 2, np.inf, 0)
        before = _numpy(model.layers[0].embeddings)
        model.fit(x, y, batch_size=1, shuffle=False, verbose=0)
        made.append(model)

    assert [row.step for row in made[0].optimizer.rows() if not row.applied] == [2]
    for one, other in zip(*map(weights, made), strict=True):
        assert np.array_equal(one, other)
    changed = (before != _numpy(made[0].layers[0].embeddings)).any(axis=1)
    assert changed.tolist() == [True] * 8 + [False]


def test_models_in_float16_are_refused():
    """With the name of a variable, and the dtype policy to use."""
    model = net("float16")
    model.compile(scaled(), "mse")
    with pytest.raises(buoy.keras.OptionError, match="first/kernel.*mixed_float16"):
        model.fit(*data(), batch_size=BATCH, verbose=0)


def test_the_example_skips_one_step_and_comes_close_to_fp32(capsys):
    """`make demo` shows it on each backend."""
    path = Path(__file__).parents[2] / "examples" / "keras_fit.py"
    loss = runpy.run_path(str(path))["main"]()
    out = capsys.readouterr().out

    assert f"Keras on {BACKEND}" in out
    assert "63 steps applied, step 21 skipped at" in out
    reference = float(out.split("loss ")[1].split()[0])
    assert loss < 1.2 * reference


def _numpy(variable):
    return keras.ops.convert_to_numpy(variable)
