"""Further kinds of trainings: generative, contrastive, physical, meta, sequences."""

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from benchmarks.headroom.training_tasks.base import (
    FULL,
    Made,
    Net,
    classification,
    classify,
    dense,
    mlp,
    ring,
    task,
)


@task()
def summed_vae(key: jax.Array) -> Made:
    """A variational autoencoder whose loss is a sum."""
    first, second, third = jax.random.split(key, 3)
    basis = jax.random.normal(third, (6, 32))

    def loss(net: Net, key: jax.Array, dtype: DTypeLike) -> jax.Array:
        a, b = jax.random.split(key)
        x = jnp.tanh(jax.random.normal(a, (64, 6)) @ basis).astype(dtype)
        mean, log = jnp.split(mlp(net[0], x), 2, axis=1)
        z = mean + jnp.exp(0.5 * log) * jax.random.normal(b, mean.shape, dtype)
        error = (mlp(net[1], z) - x).astype(FULL)
        mean = mean.astype(FULL)
        log = log.astype(FULL)
        penalty = 0.5 * jnp.sum(jnp.exp(log) + mean**2 - 1 - log)
        return jnp.sum(error**2) + 0.1 * penalty

    return [dense(first, 32, 48, 8), dense(second, 4, 48, 32)], loss


@task()
def pinn(key: jax.Array) -> Made:
    """Solve u'' = -9 sin 3x: derivatives of the net in the loss."""

    def loss(net: Net, key: jax.Array, dtype: DTypeLike) -> jax.Array:
        def u(x: jax.Array) -> jax.Array:
            return mlp(net, x[None].astype(dtype))[0]

        x = jax.random.uniform(key, (64,), maxval=3.0)
        bend = jax.vmap(jax.grad(jax.grad(u)))(x).astype(FULL)
        ends = jax.vmap(u)(jnp.array([0.0, 3.0])).astype(FULL)
        return jnp.square(bend + 9 * jnp.sin(3 * x)).mean() + jnp.square(ends).sum()

    return dense(key, 1, 32, 32, 1), loss


@task()
def flow(key: jax.Array) -> Made:
    """A normalising flow of four coupling layers on a noisy ring."""

    def loss(net: Net, key: jax.Array, dtype: DTypeLike) -> jax.Array:
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


@task()
def critic_with_gradient_penalty(key: jax.Array) -> Made:
    """The critic of a WGAN-GP between a ring and a moving blob."""

    def loss(net: Net, key: jax.Array, dtype: DTypeLike) -> jax.Array:
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


@task()
def mixture_of_experts(key: jax.Array) -> Made:
    """Eight experts behind a soft gate."""
    keys = jax.random.split(key, 10)
    goal = jax.random.normal(keys[9], (16, 4))

    def loss(net: Net, key: jax.Array, dtype: DTypeLike) -> jax.Array:
        x = jax.random.normal(key, (64, 16)).astype(dtype)
        gate = jax.nn.softmax(4 * mlp(net[0], x))
        out = sum(gate[:, i : i + 1] * mlp(e, x) for i, e in enumerate(net[1]))
        return jnp.square(out.astype(FULL) - jnp.abs(x.astype(FULL) @ goal)).mean()

    return [dense(keys[8], 16, 8), [dense(k, 16, 24, 4) for k in keys[:8]]], loss


@task()
def contrastive(key: jax.Array) -> Made:
    """Two views of one latent, temperature 0.07."""
    keys = jax.random.split(key, 4)
    views = [jax.random.normal(k, (8, 32)) for k in keys[2:]]

    def loss(net: Net, key: jax.Array, dtype: DTypeLike) -> jax.Array:
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


@task()
def diffusion(key: jax.Array) -> Made:
    """Predict the noise on a ring, at all noise levels."""

    def loss(net: Net, key: jax.Array, dtype: DTypeLike) -> jax.Array:
        a, b, c = jax.random.split(key, 3)
        angle = 6.283 * jax.random.uniform(a, (128, 1))
        level = jax.random.uniform(b, (128, 1))
        data = jnp.hstack([jnp.cos(angle), jnp.sin(angle)])
        noise = jax.random.normal(c, (128, 2))
        x = jnp.hstack([jnp.sqrt(1 - level**2) * data + level * noise, level])
        return jnp.square(mlp(net, x.astype(dtype)).astype(FULL) - noise).mean()

    return dense(key, 3, 64, 64, 2), loss


@task()
def quantised(key: jax.Array) -> Made:
    """Weights rounded to 4 bits in the forward pass, straight through backward."""

    def loss(net: Net, key: jax.Array, dtype: DTypeLike) -> jax.Array:
        coarse = jax.tree.map(
            lambda w: w + jax.lax.stop_gradient(jnp.round(w * 8) / 8 - w), net
        )
        return classify(coarse, key, dtype)

    return dense(key, 16, 64, 8), loss


@task(steps=1000)
def wgan(key: jax.Array) -> Made:
    """Generator and critic of a WGAN with clamped weights, trained together."""
    first, second = jax.random.split(key)

    def loss(net: Net, key: jax.Array, dtype: DTypeLike) -> jax.Array:
        def score(x: jax.Array) -> jax.Array:
            clamped = jax.tree.map(lambda w: jnp.clip(w, -0.5, 0.5), net[1])
            return mlp(clamped, x.astype(dtype)).astype(FULL).mean()

        a, b = jax.random.split(key)
        fake = mlp(net[0], jax.random.normal(a, (64, 4)).astype(dtype))
        against = score(jax.lax.stop_gradient(fake)) - score(ring(b, 64))
        frozen = jax.lax.stop_gradient(net[1])
        return against - mlp(frozen, fake).astype(FULL).mean()

    def far(net: Net, key: jax.Array, dtype: DTypeLike) -> jax.Array:
        fake = mlp(net[0], jax.random.normal(key, (64, 4)).astype(dtype))
        return jnp.square(jnp.linalg.norm(fake, axis=1) - 1).mean()

    return [dense(first, 4, 32, 2), dense(second, 2, 48, 1)], loss, far


@task(steps=1000)
def ppo(key: jax.Array) -> Made:
    """Clipped ratios to an old policy, a value head, an entropy bonus."""
    best = jax.random.normal(key, (8, 4))

    def loss(net: Net, key: jax.Array, dtype: DTypeLike) -> jax.Array:
        a, b, c = jax.random.split(key, 3)
        x = jax.random.normal(a, (128, 8))
        out = mlp(net, x.astype(dtype)).astype(FULL)
        logits = out[:, :4]
        value = out[:, 4]
        old = jax.lax.stop_gradient(logits) + 0.2 * jax.random.normal(b, (128, 4))
        action = jax.random.categorical(c, old)
        reward = (action == jnp.argmax(x @ best, axis=1)).astype(FULL)
        rows = jnp.arange(128)
        now = jax.nn.log_softmax(logits)
        before = jax.nn.log_softmax(old)
        ratio = jnp.exp(now[rows, action] - before[rows, action])
        gain = reward - jax.lax.stop_gradient(value)
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        surrogate = jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain)
        entropy = -(jnp.exp(now) * now).sum(axis=1)
        error = jnp.square(value - reward)
        return (0.5 * error - surrogate - 0.01 * entropy).mean()

    def missed(net: Net, key: jax.Array, dtype: DTypeLike) -> jax.Array:
        x = jax.random.normal(key, (128, 8))
        logits = mlp(net, x.astype(dtype)).astype(FULL)[:, :4]
        right = jnp.argmax(x @ best, axis=1)
        return 1 - jax.nn.softmax(logits)[jnp.arange(128), right].mean()

    return dense(key, 8, 48, 48, 5), loss, missed


@task(steps=1000)
def lora(key: jax.Array) -> Made:
    """Adapters of rank 4 on a frozen net; one factor starts at zero."""
    first, second = jax.random.split(key)
    frozen = dense(first, 16, 64, 64, 8)
    widths = [(16, 64), (64, 64), (64, 8)]
    keys = jax.random.split(second, 3)
    down = [
        jax.random.normal(k, (a, 4)) / a for k, (a, _) in zip(keys, widths, strict=True)
    ]
    up = [jnp.zeros((4, b)) for _, b in widths]

    def adapted(net: Net, x: jax.Array) -> jax.Array:
        layers = [
            (w + 4 * (a @ b), bias)
            for (w, bias), a, b in zip(frozen, *net, strict=True)
        ]
        return mlp(layers, x)

    def loss(net: Net, key: jax.Array, dtype: DTypeLike) -> jax.Array:
        return classify(net, key, dtype, run=adapted)

    return [down, up], loss


@task()
def ctc(key: jax.Array) -> Made:
    """Connectionist temporal classification of 16 frames, 5 labels."""
    first, second = jax.random.split(key)
    sounds = jax.random.normal(first, (6, 8))

    def loss(net: Net, key: jax.Array, dtype: DTypeLike) -> jax.Array:
        a, b = jax.random.split(key)
        labels = jax.random.randint(a, (16, 5), 1, 6)
        frames = jnp.repeat(sounds[labels], 3, axis=1)
        frames = frames + 0.5 * jax.random.normal(b, frames.shape)
        logits = mlp(net, frames.astype(dtype)).astype(FULL)
        heard = jnp.zeros(frames.shape[:2])
        said = jnp.zeros(labels.shape)
        return optax.ctc_loss(logits, heard, labels, said).mean()

    return dense(second, 8, 48, 6), loss


@task()
def maml(key: jax.Array) -> Made:
    """Gradients through one inner step on sines of random phase."""

    def loss(net: Net, key: jax.Array, dtype: DTypeLike) -> jax.Array:
        def error(net: Net, x: jax.Array, phase: jax.Array) -> jax.Array:
            out = mlp(net, x.astype(dtype)).astype(FULL)
            return jnp.square(out - jnp.sin(x + phase)).mean()

        def one(key: jax.Array) -> jax.Array:
            a, b, c = jax.random.split(key, 3)
            phase = jax.random.uniform(a, maxval=6.283)
            seen, asked = (
                jax.random.uniform(k, (10, 1), minval=-3.0, maxval=3.0) for k in (b, c)
            )
            inner = jax.grad(error)(net, seen, phase)
            moved = jax.tree.map(lambda w, g: w - 0.05 * g, net, inner)
            return error(moved, asked, phase)

        return jax.vmap(one)(jax.random.split(key, 8)).mean()

    return dense(key, 1, 32, 32, 1), loss


@task()
def attention(key: jax.Array) -> Made:
    """One layer of attention that recalls the token after a repeated one."""
    keys = jax.random.split(key, 4)
    net = {
        "tokens": jax.random.normal(keys[0], (16, 32)),
        "places": 0.1 * jax.random.normal(keys[1], (24, 32)),
        "qkv": jax.random.normal(keys[2], (32, 96)) / 32**0.5,
        "out": dense(keys[3], 32, 64, 16),
    }

    def loss(net: Net, key: jax.Array, dtype: DTypeLike) -> jax.Array:
        text = jax.random.randint(key, (16, 12), 0, 16)
        text = jnp.hstack([text, text])
        x = (net["tokens"][text] + net["places"]).astype(dtype)
        q, k, v = jnp.split(x @ net["qkv"].astype(dtype), 3, axis=2)
        scores = q @ k.swapaxes(1, 2) / jnp.asarray(32**0.5, dtype)
        past = jnp.tril(jnp.ones((24, 24), bool))
        weights = jax.nn.softmax(jnp.where(past, scores, -6e4), axis=2)
        logits = mlp(net["out"], x + weights @ v).astype(FULL)[:, 12:-1]
        each = optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 13:])
        return each.mean()

    return net, loss


@task(steps=1000)
def rare_embeddings(key: jax.Array) -> Made:
    """Most of 512 embeddings have no gradient in a step; some are rare."""
    first, second = jax.random.split(key)
    truth = jax.random.normal(first, (512, 4))

    def loss(net: Net, key: jax.Array, dtype: DTypeLike) -> jax.Array:
        word = (512 * jax.random.uniform(key, (32,)) ** 4).astype(jnp.int32)
        x = net[0][word].astype(dtype)
        return jnp.square(mlp(net[1], x).astype(FULL) - truth[word]).mean()

    return [jax.random.normal(second, (512, 16)), dense(key, 16, 32, 4)], loss


@task()
def distillation(key: jax.Array) -> Made:
    """Match a teacher's soft labels at temperature 8."""
    first, second = jax.random.split(key)
    teacher = dense(first, 16, 32, 8, gain=3.0)

    def loss(net: Net, key: jax.Array, dtype: DTypeLike) -> jax.Array:
        x = jax.random.normal(key, (64, 16)).astype(dtype)
        asked = jax.nn.log_softmax(mlp(net, x).astype(FULL) / 8)
        right = jax.nn.softmax(mlp(teacher, x).astype(FULL) / 8)
        return (right * (jnp.log(right) - asked)).sum(axis=1).mean()

    return dense(second, 16, 64, 8), loss


@task()
def summed_loss_of_a_large_batch(key: jax.Array) -> Made:
    """A loss that is summed over the batch, as in many older scripts."""
    return classification(key, size=2.0**12)
