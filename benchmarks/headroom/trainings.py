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

import argparse
import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

import buoy
from benchmarks.headroom import judge as judging
from benchmarks.headroom.bad_batches import (
    GOOD,
    INF_LOSS,
    NAN_GRADIENTS,
    NAN_LOSS,
)
from benchmarks.headroom.judge import EXACT, SEEDS, STOCK, Judgement, Outcome, Run
from benchmarks.headroom.training_tasks import TASKS
from benchmarks.headroom.training_tasks.base import FULL, HALF, Task
from buoy.jax import applied_of, loss_scaled, value_and_grad

__all__ = ["QUICK", "judge", "run"]

COUNTED = 2000  # skips are counted in the first so many steps

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
def _trainer(name: str, policy: Any) -> Callable[..., Any]:
    """Compile a task under a policy, for any seed and any bad batches."""
    task, exactly = TASKS[name], policy == EXACT
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
        loss, measure = losses[0], losses[-1]

        def good(weights: jax.Array, time: Any, dtype: Any) -> jax.Array:
            return loss(tree(weights), time, dtype)

        def spoilt(weights: jax.Array, time: Any, code: jax.Array) -> jax.Array:
            weights = _spoilt(weights, code == NAN_GRADIENTS)
            value = good(weights, time, dtype)
            value *= jnp.where(code == NAN_LOSS, jnp.nan, 1).astype(value.dtype)
            return value * jnp.where(code == INF_LOSS, jnp.inf, 1).astype(value.dtype)

        def step(carry: Any, now: Any) -> Any:
            (weights, state), (time, code) = carry, now
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


def run(name: str, policy: Any, seed: int = 0, *, bad: bool = True) -> Outcome:
    """Train under a policy, by name or object; `fp32` is the training in FP32.

    With `bad=False`, the bad batches of the task are left out.
    """
    return _run(name, policy, seed, bad and TASKS[name].bad is not None)


@cache
def _run(name: str, policy: Any, seed: int, bad: bool) -> Outcome:
    task = TASKS[name]
    codes = np.full(task.steps, GOOD)
    if bad and task.bad is not None:
        codes = task.bad(np.random.default_rng(seed), task.steps)
    train = _trainer(name, policy)
    kept, gone, there, dead, error = map(np.asarray, train(jax.random.key(seed), codes))
    applied = kept & (codes == GOOD)
    return Outcome(
        skips=int(np.sum(~kept[:COUNTED])),
        lost=100 * float(gone[applied].sum() / max(there[applied].sum(), 1)),
        dead=100 * float(np.sum(dead & applied) / np.sum(codes == GOOD)),
        loss=float(np.mean(error[-(task.steps // 10) :])),
    )


def judge(
    name: str, policy: Any = "headroom", seeds: Sequence[int] = SEEDS
) -> Judgement:
    """Run a task under a policy, torch's rule and FP32, and check every bound."""
    return judging.judge(run, name, policy, seeds)


def _kept(path: Path) -> Run:
    """Return `run` with its outcomes in a file, by what they depend on."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = {key: Outcome(**one) for key, one in map(json.loads, lines)}

    def kept(name: str, policy: Any, seed: int = 0, *, bad: bool = True) -> Outcome:
        bad = bad and TASKS[name].bad is not None
        key = f"{name} {policy} {seed} {bad} {_sources(name, policy)}"
        if key not in found:
            found[key] = run(name, policy, seed, bad=bad)
            with path.open("a") as file:
                file.write(json.dumps([key, asdict(found[key])]) + "\n")
        return found[key]

    return kept


@cache
def _sources(name: str, policy: Any) -> str:
    """Hash the files that an outcome depends on, of other policies' files none."""
    package, here = Path(buoy.__file__).parent, Path(__file__).parent
    of_task = inspect.getfile(TASKS[name].make)
    files = [
        *sorted((package / "_core").glob("*.py")),
        *sorted((package / "_backends").glob("jax*.py")),
        *sorted((package / "jax").rglob("*.py")),
        *(here / f"{stem}.py" for stem in ("trainings", "bad_batches")),
        here / "training_tasks" / "base.py",
        Path(of_task),
    ]
    if policy != EXACT:
        rule = buoy.policy(policy) if isinstance(policy, str) else policy
        file = Path(inspect.getfile(type(rule)))
        files += sorted(file.parent.glob(f"{file.stem}*.py"))
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _cell(one: Judgement) -> str:
    mark = " **x**" if one.broken else ""
    return f"{one.skips} / {one.lost:.3f} / {one.dead:.1f} / {one.loss:.3f}{mark}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return 1 if a policy breaks a bound."""
    parser = argparse.ArgumentParser(description="Judge policies on real trainings.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="tasks; default: all")
    parser.add_argument("--policy", nargs="+", default=["headroom"], metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--quick", action="store_true", help="a few of the tasks only")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="store outcomes here")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in TASKS]
    if unknown:
        parser.error(f"no task is named {', '.join(unknown)}; got {', '.join(TASKS)}")
    names = options.names or (QUICK if options.quick else TASKS)
    train = _kept(options.keep) if options.keep else run
    policies = [*options.policy, STOCK]
    print(f"| training | {' | '.join(policies)} |")
    print("|---" * (len(policies) + 1) + "|")
    broken = []
    for name in names:
        row = [judging.judge(train, name, policy, options.seeds) for policy in policies]
        cells = " | ".join(map(_cell, row))
        print(f"| {name.replace('_', ' ')} | {cells} |", flush=True)
        broken += row
        _trainer.cache_clear()
    print("\nBounds that are broken:")
    for one in broken:
        for sentence in one.broken:
            print(f"- {one.task.replace('_', ' ')}, {one.policy}: {sentence}")
    return int(any(one.broken and one.policy != STOCK for one in broken))


if __name__ == "__main__":
    sys.exit(main())
