"""`Watch` shows scale and skips, records the run, and says what is wrong and where."""

import math
import subprocess
import sys

import keras
import numpy as np
import pytest

import buoy.trace
from buoy.keras import OptionError, StuckError, Watch, first_nonfinite
from tests.keras.nets import BACKEND, BATCHES, data, fitted, net, scaled


def test_the_history_and_the_progress_bar_show_scale_and_skips(capsys):
    """By Keras' own logs, so that TensorBoard and CSVLogger take them as well."""
    model = net()
    model.compile(scaled(inner="adam", initial_scale=2.0**10), "mse")
    x, y = data(spoil={2})
    history = model.fit(
        x, y, batch_size=8, epochs=2, verbose=1, callbacks=[Watch()]
    ).history

    assert history["loss_scale"] == [512.0, 256.0]
    assert history["skipped_steps"] == [1, 2]
    assert "loss_scale: 512.0" in capsys.readouterr().out


def test_a_trace_has_every_step(tmp_path):
    """The same file as from the other front ends, for `buoy report` and replay."""
    options = {} if BACKEND == "torch" else {"steps_per_execution": 3}
    watch = Watch(tmp_path / "run.buoy", every=5)
    model = fitted(
        scaled("headroom", "adam"),
        data(spoil={4}),
        callbacks=[watch],
        epochs=2,
        **options,
    )
    run = buoy.trace.load(tmp_path / "run.buoy")

    assert [row.step for row in run.rows] == list(range(2 * BATCHES))
    assert [row.step for row in run.rows if not row.applied] == [4, 4 + BATCHES]
    assert run.rows[4].offenders
    assert run.rows[-1].amax == model.optimizer.rows()[-1].amax
    assert watch.lost == 0
    assert run.meta["backend"] == BACKEND
    file, page = str(tmp_path / "run.buoy"), str(tmp_path / "run.html")
    for arguments in (["watch", file, "--once"], ["report", file, "-o", page]):
        done = subprocess.run(
            [sys.executable, "-m", "buoy", *arguments],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "report" in arguments or "step 4 skipped" in done.stdout
    assert "first/kernel" in (tmp_path / "run.html").read_text()


def test_tensorboard_gets_the_scale(tmp_path):
    """Keras' own callback, after `Watch`, writes what it finds in the logs."""
    import tensorflow as tf

    board = keras.callbacks.TensorBoard(tmp_path, update_freq="epoch")
    fitted(scaled(inner="adam"), data(spoil={1}), callbacks=[Watch(), board])
    tags = {
        value.tag
        for path in tmp_path.rglob("events*")
        for event in tf.compat.v1.train.summary_iterator(str(path))
        for value in event.summary.value
    }

    assert {"epoch_loss_scale", "epoch_skipped_steps"} <= tags


def test_a_stuck_run_names_the_layer_and_the_reason():
    """The loss is NaN, because a layer turns non-finite in the forward pass."""
    model = net()
    model.compile(scaled("headroom"), "mse")
    model.layers[1].kernel.assign(np.full((8, 1), 1e30, "float32"))  # inf in FP16
    x = np.ones((8 * 60, 4), "float32")
    told = []
    watch = Watch(on_stuck=told.append, patience=20, sample=x[:8])
    model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=[watch])

    assert len(told) == 1
    assert told[0].verdict == "forward_nonfinite"
    assert told[0].offenders == ("last",)


def test_on_stuck_raises_if_it_is_told_to():
    """Infinite labels make every step infinite; `fit` ends with the reason."""
    x, y = data(spoil=range(BATCHES))
    watch = Watch(on_stuck="raise", patience=8, every=4)
    with pytest.raises(StuckError, match="first in `.*last`.*forward_nonfinite"):
        fitted(scaled(), (x, y), callbacks=[watch])


def test_first_nonfinite_finds_nothing_in_a_healthy_model():
    """And leaves the layers as they were."""
    model = net("float32")
    x, _ = data()

    assert first_nonfinite(model, x[:4]) is None
    assert "call" not in vars(model.layers[0])
    model.layers[1].bias.assign([math.nan])
    assert first_nonfinite(model, x[:4]) == "last"


def test_watch_says_what_it_needs():
    """Buoy's optimizer, and to be asked often enough."""
    with pytest.raises(OptionError, match="adopt"):
        fitted("sgd", data(), callbacks=[Watch()], auto_scale_loss=False)
    with pytest.raises(OptionError, match="64"):
        Watch(every=100)


def test_a_run_with_a_poisoned_weight_names_its_layer():
    """A weight is NaN already: everything after it must be."""
    model = net()
    model.compile(scaled("headroom"), "mse")
    model.layers[0].bias.assign(np.full(8, math.nan, "float32"))
    x = np.ones((8 * 60, 4), "float32")
    told = []
    watch = Watch(on_stuck=told.append, patience=20)
    model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=[watch])

    assert "poisoned" == told[0].verdict
    assert told[0].offenders[0].endswith("first")
