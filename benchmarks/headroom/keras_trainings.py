"""Real FP16 trainings in Keras, under `LossScaleOptimizer` and "mixed_float16".

    KERAS_BACKEND=jax python -m benchmarks.headroom.keras_trainings [NAME ...] ...

The loops are those that Keras documents for each backend; Keras clips, in place of
Buoy.  The tasks are those of `mlp_tasks`; options, table and bounds are those of
`trainings`.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from keras import ops as kops

import buoy
from benchmarks.headroom import mlp_tasks
from benchmarks.headroom.bad_batches import INF_LOSS, NAN_GRADIENTS, NAN_LOSS
from benchmarks.headroom.harness import PACKAGE, Trainings, outcome_of
from benchmarks.headroom.judge import EXACT, Outcome
from benchmarks.headroom.mlp_tasks import TASKS, Task
from buoy.keras import LossScaleOptimizer

__all__ = ["TRAININGS", "judge", "main", "run"]

BACKEND = keras.backend.backend()
READ_EVERY = 50  # steps; the optimizer remembers 64


class _Batch(NamedTuple):
    x: Any
    y: Any
    bits: Any  # float32 [batch, 1]: by how much a hidden gradient is larger
    spoil: Any  # float32 [batch, 1]: 1 where the gradients are NaN
    times: Any  # float32 []: NaN or inf where the loss is


class Raise(keras.layers.Layer):
    """Pass x; its gradient passes a tensor of the same dtype that is larger."""

    def call(self, x: Any, bits: Any) -> Any:
        factor = kops.power(2.0, kops.cast(bits, "float32"))

        def change(grad: Any) -> Any:
            inside = kops.cast(kops.cast(grad, "float32") * factor, grad.dtype)
            if BACKEND == "jax":  # or XLA removes the rounding
                import jax

                inside = jax.lax.optimization_barrier(inside)
            return kops.cast(kops.cast(inside, "float32") / factor, grad.dtype)

        return _with_gradient(x, change)


class Spoil(keras.layers.Layer):
    """Pass x, whose gradient is NaN where `spoil` is 1."""

    def call(self, x: Any, spoil: Any) -> Any:
        return _with_gradient(
            x, lambda grad: kops.where(spoil > 0, kops.full_like(grad, np.nan), grad)
        )


def _with_gradient(x: Any, change: Callable[[Any], Any]) -> Any:
    @kops.custom_gradient
    def same(x: Any) -> Any:
        def backward(*args: Any, upstream: Any = None) -> Any:
            return change(args[0] if upstream is None else upstream)  # torch names it

        return kops.copy(x), backward

    return same(x)


class _Run:
    """One training: a net in FP16, its copy in FP32, and the optimizer."""

    def __init__(self, task: Task, policy: str | buoy.Policy, seed: int) -> None:
        self.task = task
        exactly = policy == EXACT
        self.half = not exactly
        self.full_net = _net(task, "float32", seed)
        self.net = _net(task, "mixed_float16", seed) if self.half else self.full_net
        clip = task.max_norm or 1.0
        self.optimizer = LossScaleOptimizer(
            keras.optimizers.Adam(task.rate, epsilon=1e-15, global_clipnorm=clip),
            policy=buoy.Static(init_scale=1.0) if exactly else policy,
        )
        self.optimizer.build(self.net.trainable_variables)

    def loss(self, weights: Any, batch: _Batch, *, half: bool) -> Any:
        """Return the loss of a batch at these weights."""
        net = self.net if half else self.full_net
        inputs = [batch.x, batch.bits, batch.spoil]
        out, _ = net.stateless_call(weights, [], inputs, training=True)
        if self.task.classes:
            wide = kops.cast(out, "float32")
            each = kops.sparse_categorical_crossentropy(batch.y, wide, from_logits=True)
            return kops.mean(each)
        wide = out if half and self.task.half_loss else kops.cast(out, "float32")
        error = (wide - kops.cast(batch.y, wide.dtype)) * self.task.unit
        return kops.mean(kops.square(error))

    def bad_loss(self, weights: Any, batch: _Batch) -> Any:
        """Return the loss that is trained on, with the batch's fault."""
        loss = self.loss(weights, batch, half=self.half)
        return loss * kops.cast(batch.times, loss.dtype)

    def error(self, weights: Any, batch: _Batch) -> Any:
        """Return the loss in FP32, without the fault."""
        good = kops.zeros_like(batch.spoil)
        return self.loss(weights, batch._replace(spoil=good), half=False)

    def train(self, batches: Iterator[_Batch]) -> Iterator[tuple[Any, ...]]:
        """Yield what `outcome_of` wants to know of each step."""
        step, sync = LOOPS[BACKEND](self)
        seen: list[tuple[Any, ...]] = []
        for batch in batches:
            seen.append(step(batch))
            if len(seen) == READ_EVERY:
                sync()
                yield from self._with_applied(seen)
                seen = []
        sync()
        yield from self._with_applied(seen)

    def _with_applied(self, seen: list[Any]) -> Iterator[tuple[Any, ...]]:
        rows = self.optimizer.rows()[len(self.optimizer.rows()) - len(seen) :]
        for row, numbers in zip(rows, seen, strict=True):
            yield row.applied, *(kops.convert_to_numpy(x) for x in numbers)


def _net(task: Task, dtype: str, seed: int) -> keras.Model:
    x, bits, spoil = (keras.Input((n,)) for n in (task.widths[0], 1, 1))
    inputs = [x, bits, spoil]
    last = len(task.widths) - 2
    for i, width in enumerate(task.widths[1:]):
        bend = None if i == last else "tanh"
        x = keras.layers.Dense(width, activation=bend, dtype=dtype)(x)
        if i == 0:
            x = Raise(dtype=dtype)(x, bits)
    net = keras.Model(inputs, Spoil(dtype=dtype)(x, spoil))
    net.set_weights([a for layer in mlp_tasks.dense(task, seed) for a in layer])
    return net


def _seen(grads: Sequence[Any], exact: Sequence[Any], error: Any) -> tuple[Any, ...]:
    """Return how many gradients are lost and how many there are, if all, the error."""
    zero = kops.concatenate([kops.ravel(grad) == 0 for grad in grads])
    there = kops.concatenate([kops.ravel(grad) != 0 for grad in exact])
    dead = kops.logical_and(kops.any(there), kops.all(zero))
    gone = kops.logical_and(zero, there)
    return kops.sum(gone), kops.sum(there), dead, error


Loop = tuple[Callable[[_Batch], tuple[Any, ...]], Callable[[], None]]


def _in_tensorflow(one: _Run) -> Loop:
    import tensorflow as tf

    weights = [variable.value for variable in one.net.trainable_variables]

    @tf.function
    def step(batch: _Batch) -> tuple[Any, ...]:
        with tf.GradientTape() as tape:
            loss = one.optimizer.scale_loss(one.bad_loss(weights, batch))
        grads = tape.gradient(loss, weights)
        with tf.GradientTape() as tape:
            error = one.error(weights, batch)
        seen = _seen(grads, tape.gradient(error, weights), error)
        one.optimizer.apply(grads, one.net.trainable_variables)
        return seen

    return step, lambda: None


def _in_torch(one: _Run) -> Loop:
    import torch

    torch.set_num_threads(1)  # the tensors are small
    weights = [variable.value for variable in one.net.trainable_variables]

    def step(batch: _Batch) -> tuple[Any, ...]:
        loss = one.optimizer.scale_loss(one.bad_loss(weights, batch))
        grads = torch.autograd.grad(loss, weights)
        error = one.error(weights, batch)
        seen = _seen(grads, torch.autograd.grad(error, weights), error.detach())
        with torch.no_grad():
            one.optimizer.apply(grads, one.net.trainable_variables)
        return seen

    return step, lambda: None


def _in_jax(one: _Run) -> Loop:
    import jax

    optimizer = one.optimizer
    variables = one.net.trainable_variables

    def scaled(weights: Any, own: Any, batch: _Batch) -> Any:
        pairs = list(zip(optimizer.variables, own, strict=True))
        loss = one.bad_loss(weights, batch)
        with keras.StatelessScope(state_mapping=pairs):
            return optimizer.scale_loss(loss)

    @jax.jit
    def pure(weights: Any, own: Any, batch: _Batch) -> Any:
        grads = jax.grad(scaled)(weights, own, batch)
        error, exact = jax.value_and_grad(one.error)(weights, batch)
        seen = _seen(grads, exact, error)
        return seen, *optimizer.stateless_apply(own, grads, weights)

    state = [[v.value for v in variables], [v.value for v in optimizer.variables]]

    def step(batch: _Batch) -> tuple[Any, ...]:
        seen, *state[:] = pure(*state, batch)
        return seen

    def sync() -> None:
        for variable, value in zip(optimizer.variables, state[1], strict=True):
            variable.assign(value)

    return step, sync


LOOPS = {"tensorflow": _in_tensorflow, "torch": _in_torch, "jax": _in_jax}


def _train(
    name: str, policy: str | buoy.Policy, seed: int, codes: np.ndarray
) -> Outcome:
    task = TASKS[name]
    one = _Run(task, policy, seed)
    data = task.draw(np.random.default_rng([seed, 2]), task.steps)
    column = np.ones((task.steps, data.x.shape[1], 1), np.float32)
    batches = zip(
        data.x,
        data.y,
        column * data.bits[:, None, None],
        column * (codes == NAN_GRADIENTS)[:, None, None],
        np.select(
            [codes == NAN_LOSS, codes == INF_LOSS], [np.nan, np.inf], default=1.0
        ).astype(np.float32),
        strict=True,
    )
    arrays = (_Batch(*map(kops.convert_to_tensor, batch)) for batch in batches)
    return outcome_of(codes, zip(*one.train(arrays), strict=True))


def _files(name: str) -> list[Path]:
    here = Path(__file__).parent
    return [
        *sorted((PACKAGE / "_backends").rglob("*.py")),
        *sorted((PACKAGE / "keras").rglob("*.py")),
        here / "keras_trainings.py",
        here / "mlp_tasks.py",
    ]


TRAININGS = Trainings(TASKS, _train, _files, mlp_tasks.QUICK, where=BACKEND)
run = TRAININGS.run
judge = TRAININGS.judge
main = TRAININGS.main


if __name__ == "__main__":
    sys.exit(main())
