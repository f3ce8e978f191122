"""Hidden tensors: what overflows or underflows is not a gradient of a weight.

`raised` makes the gradient of one hidden tensor larger or smaller than the rest, as a
unit or a normalisation inside a model does.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from benchmarks.headroom.training_tasks.base import (
    Made,
    Net,
    classify,
    dense,
    mlp,
    task,
)


@jax.custom_vjp
def raised(x: jax.Array, bits: jax.Array) -> jax.Array:
    """Return x, whose gradient passes a tensor that is 2^bits larger."""
    return x


def _forward(x: jax.Array, bits: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x, bits


def _backward(bits: jax.Array, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    factor = 2.0**bits
    inside = (grad.astype(jnp.float32) * factor).astype(grad.dtype)
    inside = jax.lax.optimization_barrier(inside)  # or XLA removes the rounding
    outside = (inside.astype(jnp.float32) / factor).astype(grad.dtype)
    return outside, jnp.zeros_like(bits)


raised.defvjp(_forward, _backward)


def _with_raised(*bits: Any) -> Any:
    """Return the run of an MLP whose hidden layers are raised by so many bits."""

    def run(layers: list[Any], x: jax.Array) -> jax.Array:
        for layer, more in zip(layers, (*bits, None), strict=True):
            x = mlp([layer], x)
            if more is not None:
                x = raised(jnp.tanh(x), jnp.asarray(more, jnp.float32))
        return x

    return run


def _hidden(key: jax.Array, *bits: float) -> Made:
    run = _with_raised(*bits)

    def loss(net: Net, key: jax.Array, dtype: DTypeLike) -> jax.Array:
        return classify(net, key, dtype, run=run)

    return dense(key, 16, *[48] * len(bits), 8), loss


@task(steps=1000)
def hidden_above_weights(key: jax.Array) -> Made:
    """A hidden tensor is 2^12 larger; one scale fits."""
    return _hidden(key, 12.0, 0.0)


@task(steps=2000)
def hidden_beyond_fp16(key: jax.Array) -> Made:
    """A hidden tensor is 2^24 larger: the weights' gradients underflow below it."""
    return _hidden(key, 24.0, 0.0)


@task(steps=2000)
def hidden_beyond_fp16_both_ways(key: jax.Array) -> Made:
    """One hidden tensor is 2^18 larger, another 2^14 smaller: no scale fits both."""
    return _hidden(key, 18.0, -14.0)


@task(steps=2000)
def hidden_tails(key: jax.Array) -> Made:
    """The size of a hidden tensor has a heavy tail over the steps."""

    def loss(net: Net, key: jax.Array, dtype: DTypeLike) -> jax.Array:
        a, b = jax.random.split(key)
        bits = jnp.minimum(2 * jnp.abs(jax.random.t(b, 2.0)), 20.0)
        return classify(net, a, dtype, run=_with_raised(bits, 0.0))

    return dense(key, 16, 48, 48, 8), loss


@task(steps=2000)
def hidden_tails_of_samples(key: jax.Array) -> Made:
    """Single samples of a hidden tensor are far larger than the others."""

    def loss(net: Net, key: jax.Array, dtype: DTypeLike) -> jax.Array:
        a, b = jax.random.split(key)
        bits = jnp.minimum(jnp.abs(jax.random.t(b, 2.0, (64, 1))), 16.0)
        return classify(net, a, dtype, run=_with_raised(bits, 0.0))

    return dense(key, 16, 48, 48, 8), loss


@task(steps=2000, timed=True)
def hidden_rises(key: jax.Array) -> Made:
    """A hidden tensor grows by 2^20 during the run, the weights' gradients do not."""

    def loss(net: Net, key: jax.Array, dtype: DTypeLike, step: jax.Array) -> jax.Array:
        return classify(net, key, dtype, run=_with_raised(step / 100, 0.0))

    return dense(key, 16, 48, 48, 8), loss


@task(steps=2000, timed=True)
def hidden_in_blocks(key: jax.Array) -> Made:
    """A hidden tensor is 2^16 larger in every other block of 100 steps."""

    def loss(net: Net, key: jax.Array, dtype: DTypeLike, step: jax.Array) -> jax.Array:
        bits = jnp.where(step // 100 % 2 == 0, 0.0, 16.0)
        return classify(net, key, dtype, run=_with_raised(bits, 0.0))

    return dense(key, 16, 48, 48, 8), loss


@task(steps=1000)
def deep(key: jax.Array) -> Made:
    """Twenty layers without normalisation."""

    def loss(net: Net, key: jax.Array, dtype: DTypeLike) -> jax.Array:
        return classify(net, key, dtype, run=_stacked(jnp.tanh))

    return _stack(key, 20, gain=1.2), loss


@task(steps=1000, rate=1e-4)
def deep_exploding(key: jax.Array) -> Made:
    """Twenty ReLU layers whose gradients grow by 2^0.5 in each."""

    def loss(net: Net, key: jax.Array, dtype: DTypeLike) -> jax.Array:
        return classify(net, key, dtype, run=_stacked(jax.nn.relu))

    return _stack(key, 20, gain=2.0), loss


def _stack(key: jax.Array, layers: int, gain: float) -> Any:
    first, middle, last = jax.random.split(key, 3)
    inner = gain * jax.random.normal(middle, (layers, 32, 32)) / 32**0.5
    return dense(first, 16, 32), inner, dense(last, 32, 8, gain=2.0**-8)


def _stacked(bend: Any) -> Any:
    def run(net: Net, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return bend(x @ w.astype(x.dtype)), None

        x, _ = jax.lax.scan(layer, mlp(net[0], x), net[1])
        return mlp(net[2], x)

    return run


def _recurrent(key: jax.Array, gain: float, steps: int) -> Made:
    first, second = jax.random.split(key)
    w = gain * jax.random.orthogonal(first, 32)

    def loss(net: Net, key: jax.Array, dtype: DTypeLike) -> jax.Array:
        x = jax.random.normal(key, (steps, 32, 2)).astype(dtype)

        def one(state: jax.Array, now: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(state @ net[0].astype(dtype) + mlp(net[1], now)), None

        state, _ = jax.lax.scan(one, jnp.zeros((32, 32), dtype), x)
        out = mlp(net[2], state).astype(jnp.float32)[:, 0]
        return jnp.square(out - x[2, :, 0].astype(jnp.float32)).mean()

    return [w, dense(first, 2, 32), dense(second, 32, 1)], loss


@task()
def clipped_rnn(key: jax.Array) -> Made:
    """A recurrent net over 24 steps."""
    return _recurrent(key, gain=1.1, steps=24)


@task(steps=1000)
def exploding_rnn(key: jax.Array) -> Made:
    """A recurrent net over 60 steps whose gradients explode at times."""
    return _recurrent(key, gain=1.8, steps=60)


@task(steps=1000, max_norm=1.0)
def exploding_rnn_clipped(key: jax.Array) -> Made:
    """The same, clipped by `loss_scaled`."""
    return _recurrent(key, gain=1.8, steps=60)
