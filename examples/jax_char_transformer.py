"""Train a character-level transformer in real FP16: with scaling, without, and in FP32.

    python examples/jax_char_transformer.py [--steps N] [--trace FOLDER]

Everything that is computed, forward and backward, is float16; weights and optimizer are
float32.  The text is made up: sums written out in words, which are learned by counting.
The loss is the mean over all characters of the batch, and weighted, so each one's
gradient is small: below 6e-8 FP16 has only zero.  Adam does not mind small gradients.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import buoy.trace
from buoy.jax import Feed, applied_of, cast, last_step, loss_scaled, value_and_grad

WORDS = "zero one two three four five six seven eight nine ten".split()
ALPHABET = sorted(set("".join(WORDS)) | set(" +=.\n"))
BATCH = 16
LENGTH = 32  # letters of a row
WIDTH = 64
HEADS = 4
LAYERS = 2
WEIGHT = 1e-3  # of this loss, as if it were one among several
Params = dict[str, Any]


def text(seed: int, sums: int = 20_000) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Write sums in words, as numbers of letters."""
    random = np.random.default_rng(seed)
    lines = []
    for a, b in random.integers(0, 6, (sums, 2)):
        lines.append(f"{WORDS[a]} + {WORDS[b]} = {WORDS[a + b]}.\n")
    number = {letter: i for i, letter in enumerate(ALPHABET)}
    return np.array([number[letter] for letter in "".join(lines)], np.int32)


def batches(seed: int) -> Iterator[jax.Array]:
    """Cut random pieces out of the text, for ever."""
    letters = text(0)
    random = np.random.default_rng(seed)
    while True:
        starts = random.integers(0, len(letters) - LENGTH - 1, BATCH)
        yield jnp.asarray(np.stack([letters[s : s + LENGTH + 1] for s in starts]))


def init(key: jax.Array) -> Params:
    """Make the weights, in float32."""
    keys = iter(jax.random.split(key, 4 * LAYERS + 3))

    def dense(fan_in: int, fan_out: int) -> jax.Array:
        return jax.random.normal(next(keys), (fan_in, fan_out)) / fan_in**0.5

    return {
        "embed": jax.random.normal(next(keys), (len(ALPHABET), WIDTH)) * 0.1,
        "place": jax.random.normal(next(keys), (LENGTH, WIDTH)) * 0.1,
        "blocks": [
            {
                "qkv": dense(WIDTH, 3 * WIDTH),
                "out": dense(WIDTH, WIDTH),
                "up": dense(WIDTH, 4 * WIDTH),
                "down": dense(4 * WIDTH, WIDTH),
            }
            for _ in range(LAYERS)
        ],
        "head": dense(WIDTH, len(ALPHABET)),
    }


def norm(x: jax.Array) -> jax.Array:
    """Normalise each vector; the square is taken in float32, where it fits."""
    wide = x.astype(jnp.float32)
    size = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return x * size.astype(x.dtype)


def attend(block: Params, x: jax.Array) -> jax.Array:
    """Let every character look at those before it."""
    parts = jnp.split(x @ block["qkv"], 3, axis=-1)
    q, k, v = (part.reshape(BATCH, LENGTH, HEADS, -1) for part in parts)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (WIDTH // HEADS) ** -0.5
    past = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    weights = jax.nn.softmax(jnp.where(past, scores, -1e4), axis=-1)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    return mixed.reshape(BATCH, LENGTH, WIDTH) @ block["out"]


def logits(params: Params, letters: jax.Array) -> jax.Array:
    """Guess each next character."""
    x = params["embed"][letters] + params["place"]
    for block in params["blocks"]:
        x = x + attend(block, norm(x))
        x = x + jax.nn.gelu(norm(x) @ block["up"]) @ block["down"]
    return norm(x) @ params["head"]


def loss_in(dtype: str) -> Callable[[Params, jax.Array], jax.Array]:
    """Make the loss function that computes in a dtype."""

    def loss_fn(params: Params, letters: jax.Array) -> jax.Array:
        out = logits(cast(params, dtype), letters[:, :-1])
        each = optax.softmax_cross_entropy_with_integer_labels(
            out.astype(jnp.float32), letters[:, 1:]
        )
        return WEIGHT * jnp.mean(each)

    return loss_fn


def train(
    dtype: str, policy: str, steps: int, trace: Path | None = None
) -> tuple[float, int, float]:
    """Train; return the loss of the last steps, how many were skipped, the scale."""
    tx = loss_scaled(optax.adam(2e-3, eps=1e-12), policy, max_norm=1.0)
    loss_fn = loss_in(dtype)

    @jax.jit
    def step(
        params: Params, state: optax.OptState, letters: jax.Array
    ) -> tuple[Params, optax.OptState, jax.Array, jax.Array]:
        loss, grads = value_and_grad(loss_fn)(state, params, letters)
        updates, state = tx.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state, loss, applied_of(state)

    params = init(jax.random.key(0))
    state = tx.init(params)
    recorder = buoy.trace.Recorder(trace) if trace else None
    feed = Feed(recorder) if recorder else None
    losses = []
    applied = []
    for _, letters in zip(range(steps), batches(1), strict=False):
        params, state, loss, went = step(params, state, letters)
        losses.append(loss)
        applied.append(went)
        if feed:
            feed(state)
    if recorder:
        recorder.close()
    tail = losses[-max(1, steps // 10) :]
    loss = float(jnp.mean(jnp.stack(tail))) / WEIGHT
    skipped = int(steps - jnp.sum(jnp.stack(applied)))
    return loss, skipped, last_step(state).next_scale


RUNS = {
    "FP32": ("float32", "none"),
    "FP16, no scaling": ("float16", "none"),
    "FP16, backoff": ("float16", "backoff"),
    "FP16, headroom": ("float16", "headroom"),
}


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train in every way and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--trace", type=Path, help="folder for a trace of each run")
    chosen = parser.parse_args(arguments)
    told = {}
    for name, (dtype, policy) in RUNS.items():
        start = time.perf_counter()
        trace = chosen.trace and chosen.trace / f"{dtype}-{policy}.buoy"
        loss, skipped, scale = train(dtype, policy, chosen.steps, trace)
        took = time.perf_counter() - start
        told[name] = loss
        print(
            f"{name:18s} loss {loss:.4f}  skipped {skipped:2d}  "
            f"scale {scale:8.0f}  {took:5.1f} s"
        )
    return told


if __name__ == "__main__":
    main()
