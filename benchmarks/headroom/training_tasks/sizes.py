"""The size of the gradients: it jumps, alternates, is tiny or huge; it is clipped."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from benchmarks.headroom.training_tasks.base import (
    FULL,
    Made,
    Net,
    classification,
    classify,
    dense,
    mlp,
    task,
)


def _silently(value: jax.Array, factor: jax.Array) -> jax.Array:
    """Multiply the gradients of a loss, not its value."""
    scaled = value * factor
    return jax.lax.stop_gradient(value - scaled) + scaled


@task()
def two_tasks_in_turn(key: jax.Array) -> Made:
    """Gradients 2^13 apart at every other step; the value of the loss is silent."""

    def loss(net: Net, key: jax.Array, dtype: DTypeLike) -> jax.Array:
        big = jax.random.bits(key) % 2 == 0
        value = classify(net, key, dtype)
        return _silently(value, jnp.where(big, 1.0, 2.0**-13))

    return dense(key, 16, 64, 8), loss


@task(steps=1600, timed=True)
def blocks_of_tasks(key: jax.Array) -> Made:
    """Two tasks with gradients 2^13 apart, in blocks of 100 steps."""

    def loss(net: Net, key: jax.Array, dtype: DTypeLike, step: jax.Array) -> jax.Array:
        big = step // 100 % 2 == 0
        return classify(net, key, dtype, weight=jnp.where(big, 2.0**6, 2.0**-7))

    return dense(key, 16, 64, 8), loss


@task(steps=1600, timed=True)
def blocks_of_tasks_silent(key: jax.Array) -> Made:
    """The same, and the value of the loss does not show it."""

    def loss(net: Net, key: jax.Array, dtype: DTypeLike, step: jax.Array) -> jax.Array:
        big = step // 100 % 2 == 0
        value = classify(net, key, dtype)
        return _silently(value, jnp.where(big, 2.0**6, 2.0**-7))

    return dense(key, 16, 64, 8), loss


@task(steps=2000, timed=True)
def blocks_of_four_tasks(key: jax.Array) -> Made:
    """Four tasks of sizes 2^-18 to 2^6, in blocks of 50 steps, not in order."""

    def loss(net: Net, key: jax.Array, dtype: DTypeLike, step: jax.Array) -> jax.Array:
        size = jnp.array([2.0**-10, 2.0**6, 2.0**-18, 2.0**-2])[step // 50 % 4]
        return classify(net, key, dtype, weight=size)

    return dense(key, 16, 64, 8), loss


@task()
def zeros_at_first(key: jax.Array) -> Made:
    """All gradients of a fifth of the steps are zero."""

    def loss(net: Net, key: jax.Array, dtype: DTypeLike) -> jax.Array:
        value = classify(net, key, dtype)
        return jnp.where(jax.random.uniform(key) < 0.2, 0.0 * value, value)

    return dense(key, 16, 64, 8), loss


@task()
def late_fine_tuning(key: jax.Array) -> Made:
    """Gradients near the bottom of the format from the start."""
    return classification(key, size=1e-5)


@task(steps=1000)
def fine_tuning_tiny_gradients(key: jax.Array) -> Made:
    """Fine-tune a net that is nearly right: gradients fall to 2^-40."""
    first, second = jax.random.split(key)
    goal = dense(first, 16, 64, 8)

    def loss(net: Net, key: jax.Array, dtype: DTypeLike) -> jax.Array:
        x = jax.random.normal(key, (64, 16)).astype(dtype)
        change = mlp(net, x) - jax.lax.stop_gradient(mlp(goal, x))
        return 1e-7 * jnp.square(change.astype(FULL)).mean()

    nudge = dense(second, 16, 64, 8)
    near = jax.tree.map(lambda a, b: a + 0.05 * b, goal, nudge)
    return near, loss


def _reward(key: jax.Array) -> tuple[jax.Array, Callable[..., jax.Array]]:
    """Return which of four actions is best in a state, and the expected reward."""
    best = jax.random.normal(key, (8, 4))

    def missed(net: Net, key: jax.Array, dtype: DTypeLike) -> jax.Array:
        x = jax.random.normal(key, (256, 8))
        chances = jax.nn.softmax(mlp(net, x.astype(dtype)).astype(FULL))
        right = jnp.argmax(x @ best, axis=1)
        return 1 - chances[jnp.arange(256), right].mean()

    return best, missed


@task()
def reinforce(key: jax.Array) -> Made:
    """A policy gradient with rewards of 1e-6."""
    best, missed = _reward(key)

    def loss(net: Net, key: jax.Array, dtype: DTypeLike) -> jax.Array:
        a, b = jax.random.split(key)
        x = jax.random.normal(a, (256, 8))
        logits = mlp(net, x.astype(dtype)).astype(FULL)
        action = jax.random.categorical(b, logits)
        reward = 1e-6 * (action == jnp.argmax(x @ best, 1))
        return -(jax.nn.log_softmax(logits)[jnp.arange(256), action] * reward).mean()

    return dense(key, 8, 48, 48, 4), loss, missed


def _group_gradient(key: jax.Array, sigma: float) -> Made:
    """Groups of 8 answers to each of 32 questions; rewards have log-normal units."""
    best, missed = _reward(key)

    def loss(net: Net, key: jax.Array, dtype: DTypeLike) -> jax.Array:
        a, b, c = jax.random.split(key, 3)
        x = jax.random.normal(a, (32, 8))
        logits = mlp(net, x.astype(dtype)).astype(FULL)
        answers = jax.random.categorical(b, logits, shape=(8, 32))
        reward = (answers == jnp.argmax(x @ best, axis=1)).astype(FULL)
        unit = jnp.exp(sigma * jax.random.normal(c, (32,)))
        advantage = (reward - reward.mean(axis=0)) * unit
        chances = jax.nn.log_softmax(logits)[jnp.arange(32), answers]
        ratio = jnp.exp(chances - jax.lax.stop_gradient(chances))
        return -(ratio * advantage).mean()

    return dense(key, 8, 48, 48, 4), loss, missed


@task(steps=1000)
def grpo(key: jax.Array) -> Made:
    """Advantages of groups of answers, of ordinary size."""
    return _group_gradient(key, 0.5)


@task(steps=1000)
def grpo_huge_advantages(key: jax.Array) -> Made:
    """Advantages of groups of answers that reach 1e6, with a silent loss."""
    return _group_gradient(key, 4.0)


@task(steps=1000, max_norm=0.1)
def clipped(key: jax.Array) -> Made:
    """`loss_scaled` clips nearly every step."""
    return classification(key)


@task(steps=1000, max_norm=1e-7)
def clipped_tiny_gradients(key: jax.Array) -> Made:
    """`loss_scaled` clips gradients near 1e-6."""
    return classification(key, size=2.0**-20)


@task(steps=1000, max_norm=1.0)
def clipped_heavy_tails(key: jax.Array) -> Made:
    """`loss_scaled` clips gradients whose size has a heavy tail."""

    def loss(net: Net, key: jax.Array, dtype: DTypeLike) -> jax.Array:
        a, b = jax.random.split(key)
        weight = jnp.exp(jnp.abs(jax.random.t(b, 2.0)))
        return classify(net, a, dtype, weight=jnp.minimum(weight, 2.0**12))

    return dense(key, 16, 64, 8), loss


@task(steps=1000)
def noisy_labels_cubed(key: jax.Array) -> Made:
    """Regression on Cauchy noise with a cubic loss: spikes of the loss, too."""

    def loss(net: Net, key: jax.Array, dtype: DTypeLike) -> jax.Array:
        a, b = jax.random.split(key)
        x = jax.random.normal(a, (64, 8))
        noise = 0.05 * jnp.clip(jax.random.cauchy(b, (64,)), -100, 100)
        out = mlp(net, x.astype(dtype)).astype(FULL)[:, 0]
        return (jnp.abs(out - jnp.sin(x.sum(axis=1)) - noise) ** 3).mean()

    return dense(key, 8, 48, 48, 1), loss
