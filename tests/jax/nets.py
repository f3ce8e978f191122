"""A small network in real FP16, and the step that everybody writes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from buoy.jax import cast, value_and_grad

DIM = 8


def params_of(seed: int = 0, dtype: Any = jnp.float32) -> dict[str, dict[str, Any]]:
    """Two layers."""
    one, two = jax.random.split(jax.random.key(seed))
    return {
        "first": {
            "w": (jax.random.normal(one, (DIM, DIM)) / 3).astype(dtype),
            "b": jnp.zeros(DIM, dtype),
        },
        "last": {"w": (jax.random.normal(two, (DIM, 1)) / 3).astype(dtype)},
    }


def batch_of(seed: int, size: float = 1.0) -> jax.Array:
    """Inputs of about this size."""
    return size * jax.random.normal(jax.random.key(1000 + seed), (16, DIM))


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    """Compute in FP16, and the loss in float32."""
    params, x = cast((params, x), "float16")
    hidden = jnp.tanh(x @ params["first"]["w"] + params["first"]["b"])
    out = hidden @ params["last"]["w"] + x[:, :1]
    return jnp.mean(jnp.square(out.astype(jnp.float32)))


def stepper(tx: Any, loss: Callable[..., Any] = loss_fn) -> Callable[..., Any]:
    """Compile the usual training step."""

    @jax.jit
    def step(params: Any, state: Any, x: jax.Array) -> Any:
        value, grads = value_and_grad(loss)(state, params, x)
        updates, state = tx.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state, value

    return step
