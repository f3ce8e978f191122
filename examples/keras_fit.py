"""Train a small Keras model in FP16 with loss scaling, and record the run.

    KERAS_BACKEND=torch python examples/keras_fit.py      (or tensorflow, jax)

One batch has a label that FP16 cannot hold: its step is skipped, the others count.
"""

import sys
import tempfile
from pathlib import Path

import keras
import numpy as np

import buoy.keras
import buoy.trace


def main(policy: str = "headroom") -> float:
    """Train; return the last loss."""
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(2048, 8)).astype("float32")
    y = np.sin(x[:, :1]) + x[:, 1:2]
    y[700] = np.inf  # in the 22nd batch of 32

    # "mixed_float16": FP16 arithmetic, FP32 variables.
    half = {"dtype": "mixed_float16"}
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(32, activation="tanh", **half),
            keras.layers.Dense(1, **half),
        ]
    )
    # Around any optimizer; without `policy` the rule is Keras' own, within bounds.
    optimizer = buoy.keras.LossScaleOptimizer(
        keras.optimizers.Adam(1e-2, global_clipnorm=1.0), policy=policy
    )
    model.compile(optimizer, "mse")

    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "run.buoy"
        watch = buoy.keras.Watch(trace=trace)
        model.fit(x, y, epochs=1, shuffle=False, verbose=0, callbacks=[watch])
        rows = buoy.trace.load(trace).rows

    for row in rows:
        if not row.applied:
            print(f"step {row.step} was skipped at scale {row.scale:g}")
    clean = np.isfinite(y[:, 0])
    loss = float(model.evaluate(x[clean], y[clean], verbose=0))
    print(f"Keras on {keras.backend.backend()}, {policy}: loss {loss:.4f}, ", end="")
    print(f"scale 2^{np.log2(optimizer.scale):.0f}, {len(rows)} steps")
    return loss


if __name__ == "__main__":
    main(*sys.argv[1:2])
