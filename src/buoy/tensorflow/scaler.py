"""Loss scaling as a `tf.Module`: its state is `tf.Variable`s, saved by checkpoints."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from buoy._backends.tensorflow import (
    MEASURE,
    check_precision,
    look,
    ops,
    program_now,
)
from buoy._core.advance import advance, capped, foreseen, single
from buoy._core.bounds import initial
from buoy._core.errors import CallOrderError, OptionError
from buoy._core.loss_flag import LossFlag
from buoy._core.ops import Scalar
from buoy._core.policies.policy import Policy
from buoy._core.policies.registry import policy as policy_of
from buoy._core.ring import COLUMNS, LENGTH, Measured, rows_of
from buoy._core.state import State, numbers, with_numbers
from buoy._core.step import MEASUREMENTS, Row

__all__ = ["LossScaler"]

_OPS = ops()
_as_written = tf.autograph.experimental.do_not_convert


class LossScaler(tf.Module):
    """Scale losses, and apply gradients with any optimizer if they are finite.

    Works eagerly, inside `tf.function` and under XLA, on one replica; under
    `tf.distribute` use `buoy.keras.LossScaleOptimizer`.  `tf.train.Checkpoint` saves
    it.

    Example:
        >>> weight = tf.Variable([1.0])
        >>> scaler = LossScaler(policy="backoff")
        >>> with tf.GradientTape() as tape:
        ...     loss = scaler.scale(tf.reduce_sum(weight * 3.0))
        >>> (grad,) = scaler.unscale(tape.gradient(loss, [weight]))
        >>> float(grad[0])
        3.0
    """

    def __init__(
        self, policy: str | Policy = "headroom", name: str | None = None
    ) -> None:
        super().__init__(name=name)
        self.policy = policy_of(policy)
        check_precision(self.policy.precision)
        self._start = initial(self.policy)
        self._state = {
            name: tf.Variable(value, dtype=_dtype(value), trainable=False)
            for name, value in numbers(self._start).items()
        }
        self._turn = tf.Variable(0, dtype=tf.int32, trainable=False)
        self._loss = tf.Variable(0.0, trainable=False)
        self._has_loss = tf.Variable(False, trainable=False)
        self._log = tf.Variable(tf.zeros((LENGTH, len(COLUMNS))), trainable=False)
        self._half_loss = False  # known as soon as a loss is scaled, or traced
        self._loss_flag = LossFlag()

    def _read(self) -> State:
        values = {name: tf.identity(v) for name, v in self._state.items()}
        state = with_numbers(self._start, values)
        return capped(self.policy, state, _OPS) if self._half_loss else state

    def _write(self, state: State) -> None:
        values = numbers(state)
        for name, variable in self._state.items():
            variable.assign(values[name])

    @property
    def current_scale(self) -> tf.Tensor:
        """The scale of this step's loss.  float32 []."""
        return single(self._read().scale, _OPS)

    @property
    def last_step(self) -> Row:
        """The outcome of the last step; not inside `tf.function`."""
        rows = self.rows()
        if not rows:
            raise CallOrderError("No step has been taken yet. Call `apply` first.")
        return rows[-1]

    def rows(self) -> list[Row]:
        """Return the outcomes of the last 64 steps, oldest first."""
        return rows_of(int(self._turn), self._log.numpy(), [()] * LENGTH, ())

    @_as_written
    def scale(self, loss: Any) -> tf.Tensor:
        """Return the loss times the scale; a policy that looks ahead sees it first."""
        self._half_loss = loss.dtype == tf.float16
        if "loss_finite" in self.policy.wants:
            finite = tf.reduce_all(tf.math.is_finite(tf.stop_gradient(loss)))
            self._loss_flag.add(finite, program_now())
        number = tf.cast(tf.reduce_mean(tf.stop_gradient(loss)), tf.float32)
        known = tf.identity(self._has_loss)
        before = self._read()
        after = foreseen(self.policy, before, number, known=known, ops=_OPS)
        if after is not before:
            self._write(after)
        self._loss.assign(number)
        self._has_loss.assign(True)
        return tf.cast(loss, tf.float32) * self.current_scale

    @_as_written
    def unscale(self, grads: Sequence[Any]) -> list[Any]:
        """Return the gradients divided by the scale, in float32; decides nothing."""
        inverse = 1.0 / self.current_scale
        return [_times(grad, inverse) for grad in grads]

    @_as_written
    def apply(
        self, optimizer: Any, grads: Sequence[Any], variables: Sequence[Any]
    ) -> tf.Tensor:
        """Unscale the gradients and apply them if they are finite; move the scale.

        `optimizer` has `apply_gradients`, as those of Keras, tf_keras and
        `tf.compat.v1.train`, or is a function that takes the pairs of gradients and
        variables.  Returns whether the step was applied.  bool [].
        """
        if not getattr(tf.distribute.get_strategy(), "num_replicas_in_sync", 1) == 1:
            raise OptionError(
                "`LossScaler` works on one replica. Under `tf.distribute` use "
                "`buoy.keras.LossScaleOptimizer`, whose replicas agree on a step."
            )
        there = [grad for grad in grads if grad is not None]
        if not there:
            raise CallOrderError(
                "No variable has a gradient. Compute the loss inside the tape, from "
                "the variables that you pass here."
            )
        step = getattr(optimizer, "apply_gradients", optimizer)
        state = self._read()
        scale = self.current_scale
        made = advance(
            self.policy,
            state,
            look(there, 1.0 / scale),
            self._measured(there, scale),
            carried=scale,
            loss=Measured(tf.identity(self._loss), tf.identity(self._has_loss)),
            loss_finite=self._loss_flag.take(program_now()),
            ops=_OPS,
        )
        self._write(made.state)
        self._conclude(made.line)

        def apply() -> tf.Tensor:
            unscaled = [_times(grad, made.factor) for grad in grads]
            step(list(zip(unscaled, variables, strict=True)))
            return tf.constant(True)

        return tf.cond(made.applied, apply, lambda: tf.constant(False))

    def _measured(self, grads: list[Any], scale: tf.Tensor) -> dict[str, Any]:
        turn = tf.identity(self._turn)
        one = tf.ones_like(scale)
        return {
            name: tf.cond(
                MEASUREMENTS[name].due(turn),
                lambda function=function: function(grads, one),
                lambda: one * float("nan"),
            )
            for name, function in MEASURE.items()
            if name in self.policy.wants
        }

    def _conclude(self, line: Sequence[Scalar]) -> None:
        """Store the line of a step in the log, and count the step."""
        numbers = tf.stack([tf.cast(x, tf.float32) for x in line])
        index = tf.identity(self._turn) % LENGTH
        self._log.scatter_update(tf.IndexedSlices(numbers[None], index[None]))
        self._turn.assign_add(1)
        self._has_loss.assign(False)


def _dtype(value: Scalar) -> tf.DType:
    if isinstance(value, bool):
        return tf.bool
    return tf.int32 if isinstance(value, int) else tf.float32


def _times(grad: Any, factor: tf.Tensor) -> Any:
    if grad is None:
        return None
    if isinstance(grad, tf.IndexedSlices):
        values = _times(grad.values, factor)
        return tf.IndexedSlices(values, grad.indices, grad.dense_shape)
    wide = tf.cast(grad, tf.float32) if grad.dtype != tf.float64 else grad
    return wide * tf.cast(factor, wide.dtype)
