"""Train a small Keras model in FP16 with loss scaling, and record the run.

    KERAS_BACKEND=torch python examples/keras_fit.py      (or tensorflow, jax)

One batch has a label that is infinite: its step is skipped, and the others count.
"""

import sys
import tempfile
from pathlib import Path

import keras
import numpy as np

import buoy.keras
import buoy.trace

BAD = 700  # a sample of the 22nd batch of 32


def data() -> tuple[np.ndarray, np.ndarray]:
    """Make inputs and targets."""
    x = np.random.default_rng(0).normal(size=(2048, 8)).astype("float32")
    return x, np.sin(x[:, :1]) + x[:, 1:2]


def network(dtype: str) -> keras.Model:
    """Make a network with the same initial weights each time."""
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(32, activation="tanh", dtype=dtype),
            keras.layers.Dense(1, dtype=dtype),
        ]
    )


def main(policy: str = "headroom") -> float:
    """Train in FP32 and in FP16; return the last loss of FP16."""
    x, y = data()
    adam = {"learning_rate": 1e-2, "global_clipnorm": 1.0}
    wide = network("float32")
    wide.compile(keras.optimizers.Adam(**adam), "mse")
    wide.fit(x, y, shuffle=False, verbose=0)

    # "mixed_float16": FP16 arithmetic, FP32 variables.
    half = network("mixed_float16")
    # Around any optimizer; without `policy` the rule is Keras' own, within bounds.
    optimizer = buoy.keras.LossScaleOptimizer(
        keras.optimizers.Adam(**adam), policy=policy
    )
    half.compile(optimizer, "mse")
    spoiled = y.copy()
    spoiled[BAD] = np.inf
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "run.buoy"
        watch = buoy.keras.Watch(trace=trace)
        half.fit(x, spoiled, shuffle=False, verbose=0, callbacks=[watch])
        rows = buoy.trace.load(trace).rows

    reference = float(wide.evaluate(x, y, verbose=0))
    loss = float(half.evaluate(x, y, verbose=0))
    applied = sum(row.applied for row in rows)
    print(f"Keras on {keras.backend.backend()}, one batch of {len(rows)} spoiled")
    print(f"  FP32, with the correct label  loss {reference:.4f}")
    print(f"  FP16, {policy:<24}loss {loss:.4f}, {applied} steps applied", end="")
    for row in rows:
        if not row.applied:
            print(f", step {row.step} skipped at 2^{np.log2(row.scale):.0f}", end="")
    print(f", scale now 2^{np.log2(optimizer.scale):.0f}")
    return loss


if __name__ == "__main__":
    main(*sys.argv[1:2])
