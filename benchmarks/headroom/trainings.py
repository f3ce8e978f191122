"""Real FP16 trainings in JAX: forward and backward in float16, float32 weights.

    python -m benchmarks.headroom.trainings [NAME ...]

Each is run in FP32, and in FP16 under Headroom and under torch's rule.  Printed:
steps skipped / % of weight gradients that are zero in FP16 and not in FP32 / the final
loss relative to FP32's.
"""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from buoy.jax import applied_of, loss_scaled, value_and_grad

STEPS, HALF, FULL = 600, jnp.float16, jnp.float32
Loss = Callable[[Any, jax.Array, Any], jax.Array]  # of weights, key, dtype
Task = tuple[Any, Loss]
TASKS: dict[str, Callable[[jax.Array], Task]] = {}


def task(make: Callable[[jax.Array], Task]) -> Callable[[jax.Array], Task]:
    """Enter a task under its name."""
    TASKS[make.__name__] = make
    return make


def dense(key: jax.Array, *widths: int) -> list[Any]:
    """Make the weights of an MLP."""
    keys = jax.random.split(key, len(widths) - 1)
    pairs = zip(keys, widths, widths[1:], strict=False)
    return [(jax.random.normal(k, (a, b)) / a**0.5, jnp.zeros(b)) for k, a, b in pairs]


def mlp(layers: list[Any], x: jax.Array) -> jax.Array:
    """Run an MLP in the dtype of its input."""
    for i, (w, b) in enumerate(layers):
        x = x @ w.astype(x.dtype) + b.astype(x.dtype)
        x = jnp.tanh(x) if i < len(layers) - 1 else x
    return x


def _field(key: jax.Array, unit: float, *, half: bool, total: bool) -> Task:
    first, second, third = jax.random.split(key, 3)
    w1, w2 = jax.random.normal(first, (4, 32)), jax.random.normal(second, (32, 64)) / 5

    def loss(net: Any, key: jax.Array, dtype: Any) -> jax.Array:
        x = jax.random.normal(key, (128, 4))
        y = (jnp.sin(x @ w1) @ w2).astype(dtype)
        error = (mlp(net, x.astype(dtype)) - y) * unit
        square = jnp.square(error if half else error.astype(FULL))
        return square.sum() if total else square.mean()

    return dense(third, 4, 48, 48, 64), loss


@task
def field_fp16_loss(key: jax.Array) -> Task:
    """A field in units of 1e-2, its loss in FP16."""
    return _field(key, 1e-2, half=True, total=False)


@task
def field_fp16_loss_small_units(key: jax.Array) -> Task:
    """The same in units of 1e-3."""
    return _field(key, 1e-3, half=True, total=False)


@task
def field_fp16_summed_loss(key: jax.Array) -> Task:
    """The same, summed, in units of 1e-3."""
    return _field(key, 1e-3, half=True, total=True)


@task
def field_fp16_summed_loss_small_units(key: jax.Array) -> Task:
    """The same, summed, in units of 1e-5."""
    return _field(key, 1e-5, half=True, total=True)


@task
def field_small_units(key: jax.Array) -> Task:
    """A field in units of 1e-5, the loss in FP32."""
    return _field(key, 1e-5, half=False, total=False)


def _classify(net: Any, key: jax.Array, dtype: Any, weight: Any = 1.0) -> jax.Array:
    x = jax.random.normal(key, (64, 16))
    y = jnp.argmax(x[:, :8] * x[:, 8:], axis=1)
    logits = mlp(net, x.astype(dtype)).astype(FULL)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    return (each * weight).mean()


@task
def two_tasks_in_turn(key: jax.Array) -> Task:
    """Gradients 2^13 apart at every other step; the value of the loss is silent."""

    def loss(net: Any, key: jax.Array, dtype: Any) -> jax.Array:
        big = jax.random.bits(key) % 2 == 0
        value = _classify(net, key, dtype)
        scaled = value * jnp.where(big, 1.0, 2.0**-13)
        return jax.lax.stop_gradient(value - scaled) + scaled

    return dense(key, 16, 64, 8), loss


@task
def chi_square(key: jax.Array) -> Task:
    """Residuals over a small sigma: activation gradients far above the weights'."""

    def loss(net: Any, key: jax.Array, dtype: Any) -> jax.Array:
        x = jax.random.normal(key, (64, 4))
        seen = mlp(net, x.astype(dtype)) * jnp.asarray(1e-3, dtype)
        hidden = (seen.astype(FULL) - 1e-3 * jnp.sin(x[:, :1])) / 1e-5
        return jnp.square(hidden).mean()

    return dense(key, 4, 48, 48, 1), loss


@task
def zeros_at_first(key: jax.Array) -> Task:
    """All gradients are zero until the output leaves a dead zone by noise."""

    def loss(net: Any, key: jax.Array, dtype: Any) -> jax.Array:
        value = _classify(net, key, dtype)
        return jnp.where(jax.random.uniform(key) < 0.2, 0.0 * value, value)

    return dense(key, 16, 64, 8), loss


@task
def late_fine_tuning(key: jax.Array) -> Task:
    """Gradients near the bottom of the format from the start."""

    def loss(net: Any, key: jax.Array, dtype: Any) -> jax.Array:
        return _classify(net, key, dtype, weight=1e-5)

    return dense(key, 16, 64, 8), loss


@task
def summed_vae(key: jax.Array) -> Task:
    """A variational autoencoder whose loss is a sum."""
    first, second, third = jax.random.split(key, 3)
    basis = jax.random.normal(third, (6, 32))

    def loss(net: Any, key: jax.Array, dtype: Any) -> jax.Array:
        a, b = jax.random.split(key)
        x = jnp.tanh(jax.random.normal(a, (64, 6)) @ basis).astype(dtype)
        mean, log = jnp.split(mlp(net[0], x), 2, axis=1)
        z = mean + jnp.exp(0.5 * log) * jax.random.normal(b, mean.shape, dtype)
        error = (mlp(net[1], z) - x).astype(FULL)
        mean, log = mean.astype(FULL), log.astype(FULL)
        penalty = 0.5 * jnp.sum(jnp.exp(log) + mean**2 - 1 - log)
        return jnp.sum(error**2) + 0.1 * penalty

    return [dense(first, 32, 48, 8), dense(second, 4, 48, 32)], loss


@task
def pinn(key: jax.Array) -> Task:
    """Solve u'' = -9 sin 3x: derivatives of the net in the loss."""

    def loss(net: Any, key: jax.Array, dtype: Any) -> jax.Array:
        def u(x: jax.Array) -> jax.Array:
            return mlp(net, x[None].astype(dtype))[0]

        x = jax.random.uniform(key, (64,), maxval=3.0)
        bend = jax.vmap(jax.grad(jax.grad(u)))(x).astype(FULL)
        ends = jax.vmap(u)(jnp.array([0.0, 3.0])).astype(FULL)
        return jnp.square(bend + 9 * jnp.sin(3 * x)).mean() + jnp.square(ends).sum()

    return dense(key, 1, 32, 32, 1), loss


@task
def flow(key: jax.Array) -> Task:
    """A normalising flow of four coupling layers on a noisy ring."""

    def loss(net: Any, key: jax.Array, dtype: Any) -> jax.Array:
        a, b = jax.random.split(key)
        angle = 6.283 * jax.random.uniform(a, (128,))
        x = jnp.stack([jnp.cos(angle), jnp.sin(angle)], 1)
        x = (2 * x + 0.1 * jax.random.normal(b, x.shape)).astype(dtype)
        volume = jnp.zeros(128)
        for layer in net:
            log, shift = jnp.split(mlp(layer, x[:, :1]), 2, axis=1)
            log = jnp.tanh(log)
            x = jnp.hstack([x[:, 1:] * jnp.exp(log) + shift, x[:, :1]])
            volume = volume + log[:, 0].astype(FULL)
        return (0.5 * jnp.square(x.astype(FULL)).sum(1) - volume).mean() + 3

    return [dense(k, 1, 24, 2) for k in jax.random.split(key, 4)], loss


@task
def critic_with_gradient_penalty(key: jax.Array) -> Task:
    """The critic of a WGAN-GP between a ring and a moving blob."""

    def loss(net: Any, key: jax.Array, dtype: Any) -> jax.Array:
        def score(x: jax.Array) -> jax.Array:
            return mlp(net, x.astype(dtype))[0].astype(FULL)

        a, b, c = jax.random.split(key, 3)
        angle = 6.283 * jax.random.uniform(a, (64,))
        real = jnp.stack([jnp.cos(angle), jnp.sin(angle)], 1)
        fake = 0.3 * jax.random.normal(b, (64, 2))
        mixed = fake + jax.random.uniform(c, (64, 1)) * (real - fake)
        slope = jax.vmap(jax.grad(score))(mixed)
        slope = jnp.sqrt(1e-6 + jnp.square(slope).sum(1))
        apart = jax.vmap(score)(fake).mean() - jax.vmap(score)(real).mean()
        return apart + 10 * jnp.square(slope - 1).mean() + 3

    return dense(key, 2, 48, 48, 1), loss


@task
def clipped_rnn(key: jax.Array) -> Task:
    """A recurrent net over 24 steps."""
    first, second = jax.random.split(key)
    w = 1.1 * jax.random.orthogonal(first, 32)

    def loss(net: Any, key: jax.Array, dtype: Any) -> jax.Array:
        x = jax.random.normal(key, (32, 24, 2)).astype(dtype)
        state = jnp.zeros((32, 32), dtype)
        for t in range(24):
            state = jnp.tanh(state @ net[0].astype(dtype) + mlp(net[1], x[:, t]))
        out = mlp(net[2], state).astype(FULL)[:, 0]
        return jnp.square(out - x[:, 2, 0].astype(FULL)).mean()

    return [w, dense(first, 2, 32), dense(second, 32, 1)], loss


@task
def reinforce(key: jax.Array) -> Task:
    """A policy gradient with rewards of 1e-6."""
    best = jax.random.normal(key, (8, 4))

    def loss(net: Any, key: jax.Array, dtype: Any) -> jax.Array:
        a, b = jax.random.split(key)
        x = jax.random.normal(a, (256, 8))
        logits = mlp(net, x.astype(dtype)).astype(FULL)
        action = jax.random.categorical(b, logits)
        reward = 1e-6 * (action == jnp.argmax(x @ best, 1))
        return -(jax.nn.log_softmax(logits)[jnp.arange(256), action] * reward).mean()

    return dense(key, 8, 48, 48, 4), loss


@task
def mixture_of_experts(key: jax.Array) -> Task:
    """Eight experts behind a soft gate."""
    keys = jax.random.split(key, 10)
    goal = jax.random.normal(keys[9], (16, 4))

    def loss(net: Any, key: jax.Array, dtype: Any) -> jax.Array:
        x = jax.random.normal(key, (64, 16)).astype(dtype)
        gate = jax.nn.softmax(4 * mlp(net[0], x))
        out = sum(gate[:, i : i + 1] * mlp(e, x) for i, e in enumerate(net[1]))
        return jnp.square(out.astype(FULL) - jnp.abs(x.astype(FULL) @ goal)).mean()

    return [dense(keys[8], 16, 8), [dense(k, 16, 24, 4) for k in keys[:8]]], loss


@task
def contrastive(key: jax.Array) -> Task:
    """Two views of one latent, temperature 0.07."""
    keys = jax.random.split(key, 4)
    views = [jax.random.normal(k, (8, 32)) for k in keys[2:]]

    def loss(net: Any, key: jax.Array, dtype: Any) -> jax.Array:
        z = jax.random.normal(key, (64, 8))
        a, b = (
            mlp(one, (z @ view).astype(dtype)).astype(FULL)
            for one, view in zip(net, views, strict=True)
        )
        a, b = (e / (1e-3 + jnp.linalg.norm(e, axis=1, keepdims=True)) for e in (a, b))
        each = optax.softmax_cross_entropy_with_integer_labels(
            a @ b.T / 0.07, jnp.arange(64)
        )
        return each.mean()

    return [dense(k, 32, 64, 16) for k in keys[:2]], loss


@task
def diffusion(key: jax.Array) -> Task:
    """Predict the noise on a ring, at all noise levels."""

    def loss(net: Any, key: jax.Array, dtype: Any) -> jax.Array:
        a, b, c = jax.random.split(key, 3)
        angle, level = (
            6.283 * jax.random.uniform(a, (128, 1)),
            jax.random.uniform(b, (128, 1)),
        )
        data, noise = (
            jnp.hstack([jnp.cos(angle), jnp.sin(angle)]),
            jax.random.normal(c, (128, 2)),
        )
        x = jnp.hstack([jnp.sqrt(1 - level**2) * data + level * noise, level])
        return jnp.square(mlp(net, x.astype(dtype)).astype(FULL) - noise).mean()

    return dense(key, 3, 64, 64, 2), loss


@task
def quantised(key: jax.Array) -> Task:
    """Weights rounded to 4 bits in the forward pass, straight through backward."""

    def loss(net: Any, key: jax.Array, dtype: Any) -> jax.Array:
        coarse = jax.tree.map(
            lambda w: w + jax.lax.stop_gradient(jnp.round(w * 8) / 8 - w), net
        )
        return _classify(coarse, key, dtype)

    return dense(key, 16, 64, 8), loss


def run(name: str, policy: str | None, seed: int = 0) -> tuple[int, float, float]:
    """Train; return the skips, the % of gradients lost and the final loss."""
    weights, loss = TASKS[name](jax.random.key(seed))
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3, eps=1e-15))
    tx = loss_scaled(inner, policy or "none")
    dtype = FULL if policy is None else HALF

    def step(carry: Any, key: jax.Array) -> Any:
        weights, state = carry
        value, grads = value_and_grad(lambda w: loss(w, key, dtype))(state, weights)
        exact = jax.grad(lambda w: loss(w, key, FULL).astype(FULL))(weights)
        pairs = list(zip(jax.tree.leaves(grads), jax.tree.leaves(exact), strict=True))
        gone = sum(jnp.sum((g == 0) & (e != 0)) for g, e in pairs)
        there = sum(jnp.sum(e != 0) for _, e in pairs)
        updates, state = tx.update(grads, state, weights, value=value)
        kept = applied_of(state)
        error = loss(weights, key, FULL).astype(FULL)
        return (optax.apply_updates(weights, updates), state), (
            kept,
            gone,
            there,
            error,
        )

    keys = jax.random.split(jax.random.key(seed + 1), STEPS)
    train = jax.jit(lambda carry: jax.lax.scan(step, carry, keys))
    _, (kept, gone, there, error) = train((weights, tx.init(weights)))
    lost = 100 * float(jnp.sum(jnp.where(kept, gone, 0)) / jnp.sum(there))
    return int(STEPS - jnp.sum(kept)), lost, float(jnp.mean(error[-100:]))


def main() -> None:
    """Print the table."""
    print("| training | headroom | torch's rule |\n|---|---|---|")
    for name in sys.argv[1:] or TASKS:
        exact = run(name, None)[2]
        cells = []
        for policy in ("headroom", "torch"):
            skips, lost, error = run(name, policy)
            cells.append(f"{skips} / {lost:.3f} / {error / exact:.2f}")
        print(f"| {name.replace('_', ' ')} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
