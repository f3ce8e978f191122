"""Train a Flax NNX model in FP16 with Buoy, recorded, with a report.

    python examples/flax_nnx.py [--steps N]

Forward and backward passes are float16, weights and optimizer float32.  The targets are
in SI units (about 1e-5), so that most gradients are below the smallest FP16 number.
`loss_scaled` wraps the optax optimizer, and `value_and_grad` replaces that of NNX: the
rest of the loop is as without loss scaling.
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import buoy.report
import buoy.trace
from buoy.jax import Feed, last_step, loss_scaled, value_and_grad

UNIT = 1e-5  # of the targets


class Model(nnx.Module):
    """Two layers that compute in float16, with weights in float32."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(8, 64, dtype=jnp.float16, rngs=rngs)
        self.second = nnx.Linear(64, 1, dtype=jnp.float16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return one number per row, in float32."""
        return self.second(jnp.tanh(self.first(x))).astype(jnp.float32)


def loss_fn(model: Model, x: jax.Array, y: jax.Array) -> jax.Array:
    """Compute the mean squared error in SI units, in float32."""
    return jnp.mean((model(x) * UNIT - y) ** 2)


@nnx.jit
def train_step(
    model: Model, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array
) -> jax.Array:
    """Scale the loss, differentiate, and update the weights if all is finite."""
    grad_fn = value_and_grad(loss_fn, transform=nnx.value_and_grad)
    loss, grads = grad_fn(optimizer, model, x, y)
    optimizer.update(model, grads, value=loss)
    return loss


def main() -> None:
    """Train, print the loss, and write the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    model = Model(nnx.Rngs(0))
    tx = loss_scaled(optax.adam(1e-2, eps=1e-20), "headroom")
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    losses = []
    with buoy.trace.Recorder("flax_nnx.buoy") as recorder:
        feed = Feed(recorder)
        for step in range(steps):
            x = jax.random.normal(jax.random.key(step), (64, 8))
            y = UNIT * (x[:, :1] - x[:, 1:2])
            losses.append(train_step(model, optimizer, x, y))
            feed(optimizer.opt_state)
    tail = losses[-10:]
    last = sum(map(float, tail)) / len(tail) / UNIT**2
    print(f"loss: {last:.4f}, last step: {last_step(optimizer.opt_state)}")
    buoy.report.write([recorder.path], "flax_nnx.html")
    print("Open flax_nnx.html: see where the scale settled, and the headroom.")


if __name__ == "__main__":
    main()
