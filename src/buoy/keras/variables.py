"""The state of the optimizer: Keras variables, saved with the model.

`dynamic_scale` and `step_counter` are those of Keras' own optimizer; they hold the
scale and the clean steps of the policy's state.  After them come the other fields of
that state, the number of steps, the loss of this step, and the log of the last steps.
"""

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops as kops

from buoy._core.ops import Precision, Scalar
from buoy._core.ring import COLUMNS, LENGTH, Measured, rows_of
from buoy._core.state import State, numbers, with_numbers
from buoy._core.step import Row
from buoy.keras.backend import backend

__all__ = ["Variables"]

_OF_KERAS = {"scale": "dynamic_scale", "clean_steps": "step_counter"}


class Variables:
    """The variables of one optimizer: makes them, reads them and writes them."""

    def __init__(
        self, optimizer: Any, start: State, precision: Precision, names: Sequence[str]
    ) -> None:
        self.width = len(names)
        self._names = names
        self._start = start
        self._state: dict[str, Any] = {}
        for name, value in numbers(start).items():
            if name in _OF_KERAS:
                self._state[name] = getattr(optimizer, _OF_KERAS[name])
                continue
            self._state[name] = optimizer.add_variable(
                (),
                initializer=keras.initializers.Constant(value),
                dtype=_dtype(value, precision),
                name=f"policy_{name.replace('.', '_')}",
            )
        self.turn = optimizer.add_variable((), dtype="int32", name="turn")
        self.loss = optimizer.add_variable((), dtype="float32", name="loss")
        self.has_loss = optimizer.add_variable((), dtype="bool", name="has_loss")
        self._log = optimizer.add_variable(
            (LENGTH, len(COLUMNS) + len(names)), dtype="float32", name="log"
        )

    def read(self) -> State:
        """Return the policy's state."""
        values = {name: _value(variable) for name, variable in self._state.items()}
        return with_numbers(self._start, values)

    def write(self, state: State) -> None:
        """Store the policy's state."""
        values = numbers(state)
        for name, variable in self._state.items():
            variable.assign(values[name])

    def keep_loss(self, loss: Scalar) -> None:
        """Store the loss of this step."""
        self.loss.assign(loss)
        self.has_loss.assign(kops.ones((), "bool"))

    def kept_loss(self) -> Measured:
        """Return the loss of this step, if there was one."""
        return Measured(
            kops.convert_to_tensor(self.loss), kops.convert_to_tensor(self.has_loss)
        )

    def log(self, line: Sequence[Scalar], bad: Scalar) -> None:
        """Store the line of a step in the log, and count the step."""
        turn = kops.convert_to_tensor(self.turn)
        numbers = [kops.cast(x, "float32") for x in line]
        whole = kops.concatenate([kops.stack(numbers), kops.cast(bad, "float32")])
        _write_row(self._log, turn % LENGTH, whole)
        self.turn.assign(turn + 1)
        self.has_loss.assign(kops.zeros((), "bool"))

    def rows(self) -> list[Row]:
        """Read the log, oldest step first."""
        log = kops.convert_to_numpy(self._log)
        width = len(COLUMNS)
        steps = int(kops.convert_to_numpy(self.turn))
        return rows_of(steps, log[:, :width], log[:, width:], self._names)


def _dtype(value: Scalar, precision: Precision) -> str:
    if isinstance(value, bool):
        return "bool"
    return "int32" if isinstance(value, int) else precision


def _value(variable: Any) -> Any:
    """Return a variable's value; integers as int32, though TensorFlow's are int64."""
    value = kops.convert_to_tensor(variable)
    return kops.cast(value, "int32") if "int" in variable.dtype else value


def _write_row(log: Any, index: Any, line: Any) -> None:
    if backend().name == "tensorflow":
        import tensorflow as tf  # noqa: PLC0415

        log.value.scatter_update(tf.IndexedSlices(line[None], index[None]))
        return
    here = kops.expand_dims(kops.arange(LENGTH) == index, 1)
    # `assign` of the base class: Keras' tests replace that of the variables' class, to
    # find optimizers that write whole arrays where only a few rows have gradients.
    super(keras.Variable, log).assign(kops.where(here, line, log.value))
