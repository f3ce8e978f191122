"""Fields in small units: tiny gradients, and losses that are computed in FP16."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from benchmarks.headroom.training_tasks.base import FULL, Made, Net, dense, mlp, task


def field(key: jax.Array, unit: float, *, half: bool, total: bool) -> Made:
    """Fit a field of 64 values, the loss in FP16 or FP32, a sum or a mean."""
    first, second, third = jax.random.split(key, 3)
    w1 = jax.random.normal(first, (4, 32))
    w2 = jax.random.normal(second, (32, 64)) / 5

    def loss(net: Net, key: jax.Array, dtype: DTypeLike) -> jax.Array:
        x = jax.random.normal(key, (128, 4))
        y = (jnp.sin(x @ w1) @ w2).astype(dtype)
        error = (mlp(net, x.astype(dtype)) - y) * unit
        square = jnp.square(error if half else error.astype(FULL))
        return square.sum() if total else square.mean()

    return dense(third, 4, 48, 48, 64), loss


@task()
def field_fp16_loss(key: jax.Array) -> Made:
    """A field in units of 1e-2, its loss in FP16."""
    return field(key, 1e-2, half=True, total=False)


@task()
def field_fp16_loss_small_units(key: jax.Array) -> Made:
    """The same in units of 1e-3."""
    return field(key, 1e-3, half=True, total=False)


@task()
def field_fp16_summed_loss(key: jax.Array) -> Made:
    """The same, summed, in units of 1e-3."""
    return field(key, 1e-3, half=True, total=True)


@task()
def field_fp16_summed_loss_small_units(key: jax.Array) -> Made:
    """The same, summed, in units of 1e-5."""
    return field(key, 1e-5, half=True, total=True)


@task()
def field_small_units(key: jax.Array) -> Made:
    """A field in units of 1e-5, the loss in FP32."""
    return field(key, 1e-5, half=False, total=False)


@task()
def chi_square(key: jax.Array) -> Made:
    """Residuals over a small sigma: activation gradients far above the weights'."""

    def loss(net: Net, key: jax.Array, dtype: DTypeLike) -> jax.Array:
        x = jax.random.normal(key, (64, 4))
        seen = mlp(net, x.astype(dtype)) * jnp.asarray(1e-3, dtype)
        hidden = (seen.astype(FULL) - 1e-3 * jnp.sin(x[:, :1])) / 1e-5
        return jnp.square(hidden).mean()

    return dense(key, 4, 48, 48, 1), loss
