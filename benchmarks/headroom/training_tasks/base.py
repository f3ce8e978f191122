"""What the tasks share: how they are entered, small nets, a classification."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from benchmarks.headroom.bad_batches import Schedule

__all__ = [
    "FULL",
    "HALF",
    "TASKS",
    "Loss",
    "Made",
    "Net",
    "Task",
    "classification",
    "classify",
    "dense",
    "mlp",
    "ring",
    "task",
]

HALF = jnp.float16
FULL = jnp.float32

Net = Any  # the weights: a tree of arrays
# Of net, key and dtype; of `timed` tasks also the step.
Loss = Callable[..., jax.Array]
# The weights, the loss, and where it differs, the loss by which a result is judged.
Made = tuple[Net, Loss] | tuple[Net, Loss, Loss]


@dataclass(frozen=True)
class Task:
    """How a task is trained."""

    make: Callable[[jax.Array], Made]
    steps: int
    rate: float  # Adam's learning rate
    max_norm: float | None  # of `loss_scaled`; if None, optax clips at 1
    bad: Schedule | None  # which batches are bad
    timed: bool  # the loss depends on the step


TASKS: dict[str, Task] = {}

Maker = Callable[[jax.Array], Made]


def task(
    *,
    steps: int = 600,
    rate: float = 3e-3,
    max_norm: float | None = None,
    bad: Schedule | None = None,
    timed: bool = False,
) -> Callable[[Maker], Maker]:
    """Enter a task under its name."""

    def enter(make: Maker) -> Maker:
        if make.__name__ in TASKS:
            raise ValueError(f"There are two tasks named {make.__name__!r}.")
        TASKS[make.__name__] = Task(make, steps, rate, max_norm, bad, timed)
        return make

    return enter


def dense(key: jax.Array, *widths: int, gain: float = 1.0) -> list[Any]:
    """Make the weights of an MLP."""
    keys = jax.random.split(key, len(widths) - 1)
    pairs = zip(keys, widths, widths[1:], strict=False)
    return [
        (gain * jax.random.normal(k, (a, b)) / a**0.5, jnp.zeros(b))
        for k, a, b in pairs
    ]


def mlp(layers: list[Any], x: jax.Array) -> jax.Array:
    """Run an MLP in the dtype of its input."""
    for i, (w, b) in enumerate(layers):
        x = x @ w.astype(x.dtype) + b.astype(x.dtype)
        x = jnp.tanh(x) if i < len(layers) - 1 else x
    return x


def classify(
    net: Net,
    key: jax.Array,
    dtype: DTypeLike,
    weight: Any = 1.0,
    run: Callable[[Any, jax.Array], jax.Array] = mlp,
) -> jax.Array:
    """Return the cross-entropy of a batch of eight classes, in FP32."""
    x = jax.random.normal(key, (64, 16))
    y = jnp.argmax(x[:, :8] * x[:, 8:], axis=1)
    logits = run(net, x.astype(dtype)).astype(FULL)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    return (each * weight).mean()


def classification(key: jax.Array, size: float = 1.0) -> Made:
    """Classify with one hidden layer; the gradients have a size."""

    def loss(net: Net, key: jax.Array, dtype: DTypeLike) -> jax.Array:
        return classify(net, key, dtype, weight=size)

    return dense(key, 16, 64, 8), loss


def ring(key: jax.Array, points: int) -> jax.Array:
    """Draw points on the unit circle."""
    angle = 2 * jnp.pi * jax.random.uniform(key, (points,))
    return jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1)
