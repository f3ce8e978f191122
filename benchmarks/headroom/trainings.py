"""Real FP16 trainings in JAX: forward and backward in float16, float32 weights.

    python -m benchmarks.headroom.trainings [NAME ...] [--policy NAME ...] [--quick]

Each task is trained with three seeds in FP32, under torch's rule and under the given
policies (Headroom, if none is given).  Printed for each policy: steps skipped / % of
weight gradients lost / % of good steps whose gradients are all zero / the final loss
relative to FP32's; the worst seed, and the mean loss.  Then which bounds of `judge` a
policy breaks.

`--keep FILE` stores each outcome in a file and takes those from it whose sources have
not changed since, so that a run can be interrupted, and repeated after a change.
"""

import inspect
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

import buoy
from benchmarks.headroom.bad_batches import INF_LOSS, NAN_GRADIENTS, NAN_LOSS
from benchmarks.headroom.harness import PACKAGE, Trainings, outcome_of
from benchmarks.headroom.judge import EXACT, Outcome
from benchmarks.headroom.training_tasks import TASKS
from benchmarks.headroom.training_tasks.base import FULL, HALF, Task
from buoy.jax import applied_of, loss_scaled, value_and_grad

__all__ = ["QUICK", "TRAININGS", "judge", "run"]

# One of each theme, the cheapest: for tests, and for a first look.
QUICK = (
    "nan_loss_first_steps",
    "nan_gradients_three_in_a_row",
    "field_fp16_summed_loss",
    "field_small_units",
    "chi_square",
    "two_tasks_in_turn",
    "hidden_above_weights",
    "clipped",
)


@jax.custom_vjp
def _spoilt(weights: jax.Array, spoil: jax.Array) -> jax.Array:
    """Return the weights, whose gradient is NaN if `spoil` is true."""
    return weights


_spoilt.defvjp(
    lambda weights, spoil: (weights, spoil),
    lambda spoil, grad: (jnp.where(spoil, jnp.nan, grad), None),
)


@cache
def _trainer(name: str, policy: str | buoy.Policy) -> Callable[..., Any]:
    """Compile a task under a policy, for any seed and any bad batches."""
    task = TASKS[name]
    exactly = policy == EXACT
    dtype = FULL if exactly else HALF
    tx = loss_scaled(
        _optimizer(task),
        buoy.Static(init_scale=1.0) if exactly else policy,
        max_norm=task.max_norm,
    )

    def train(key: jax.Array, codes: jax.Array) -> Any:
        made = task.make(key)
        weights, tree = ravel_pytree(made[0])  # one leaf compiles faster than many
        losses = [partial(_call, loss, task) for loss in made[1:]]
        loss = losses[0]
        measure = losses[-1]

        def good(weights: jax.Array, time: Any, dtype: Any) -> jax.Array:
            return loss(tree(weights), time, dtype)

        def spoilt(weights: jax.Array, time: Any, code: jax.Array) -> jax.Array:
            weights = _spoilt(weights, code == NAN_GRADIENTS)
            value = good(weights, time, dtype)
            value *= jnp.where(code == NAN_LOSS, jnp.nan, 1).astype(value.dtype)
            return value * jnp.where(code == INF_LOSS, jnp.inf, 1).astype(value.dtype)

        def step(carry: Any, now: Any) -> Any:
            weights, state = carry
            time, code = now
            value, grads = value_and_grad(spoilt)(state, weights, time, code)
            exact = jax.grad(lambda w: good(w, time, FULL).astype(FULL))(weights)
            error = measure(tree(weights), time, FULL).astype(FULL)
            updates, state = tx.update(grads, state, weights, value=value)
            kept = applied_of(state)
            there = exact != 0
            gone = (grads == 0) & there
            dead = jnp.any(there) & jnp.all(grads == 0)
            seen = kept, jnp.sum(gone), jnp.sum(there), dead, error
            return (optax.apply_updates(weights, updates), state), seen

        keys = jax.random.split(jax.random.fold_in(key, 1), task.steps)
        times = keys, jnp.arange(task.steps)
        _, seen = jax.lax.scan(step, (weights, tx.init(weights)), (times, codes))
        return seen

    return jax.jit(train)


def _optimizer(task: Task) -> optax.GradientTransformation:
    adam = optax.adam(task.rate, eps=1e-15)
    if task.max_norm is not None:
        return adam
    return optax.chain(optax.clip_by_global_norm(1.0), adam)


def _call(loss: Any, task: Task, net: Any, time: Any, dtype: Any) -> jax.Array:
    key, step = time
    return loss(net, key, dtype, step) if task.timed else loss(net, key, dtype)


def _train(
    name: str, policy: str | buoy.Policy, seed: int, codes: np.ndarray
) -> Outcome:
    return outcome_of(codes, _trainer(name, policy)(jax.random.key(seed), codes))


def _files(name: str) -> list[Path]:
    here = Path(__file__).parent
    return [
        *sorted((PACKAGE / "_backends").glob("jax*.py")),
        *sorted((PACKAGE / "jax").rglob("*.py")),
        here / "trainings.py",
        here / "training_tasks" / "base.py",
        Path(inspect.getfile(TASKS[name].make)),
    ]


TRAININGS = Trainings(TASKS, _train, _files, QUICK, _trainer.cache_clear)
run = TRAININGS.run
judge = TRAININGS.judge
main = TRAININGS.main


if __name__ == "__main__":
    sys.exit(main())
