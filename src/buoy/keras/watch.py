"""A callback: scale and skips in the progress bar, a trace, warnings."""

import math
import os
import time
from functools import partial
from typing import Any

import keras

from buoy._core.errors import OptionError
from buoy._core.feed import feed
from buoy._core.ring import LENGTH
from buoy._core.step import Row
from buoy._core.verdicts import Verdict
from buoy._core.watch import PATIENCE, OnStuck
from buoy._core.watch import Watch as Episodes
from buoy.keras.layers import first_nonfinite, layer_of, nonfinite_weights
from buoy.keras.optimizer import LossScaleOptimizer
from buoy.trace.record import Recorder

__all__ = ["Watch"]

_EVERY = 16  # batches between two reads of the log


class Watch(keras.callbacks.Callback):
    """Show the scale while a model trains, record the run, and warn if it is stuck.

    Adds `loss_scale` and `skipped_steps` to the logs: the progress bar and the history
    show them, and so does `keras.callbacks.TensorBoard` if it comes after this callback
    in the list.

    Args:
        trace: a file to record to, or a `buoy.trace.Recorder`; None records nothing.
        on_stuck: "warn", "raise" a `StuckError`, or a function of a `Stuck`.
        patience: how many steps in a row are skipped, or have gradients that are all
            zero, before a run counts as stuck.
        every: batches between two reads of the optimizer's log, at most 64.
        sample: inputs of one batch, used to find the first layer whose output is not
            finite.

    Example:
        >>> import numpy as np
        >>> model = keras.Sequential([keras.layers.Dense(1)])
        >>> model.compile(LossScaleOptimizer("sgd"), "mse")
        >>> ones = np.ones((4, 1), "float32")
        >>> history = model.fit(ones, ones, callbacks=[Watch()], verbose=0)
        >>> history.history["loss_scale"], history.history["skipped_steps"]
        ([32768.0], [0])
    """

    def __init__(
        self,
        trace: str | os.PathLike[str] | Recorder | None = None,
        *,
        on_stuck: OnStuck = "warn",
        patience: int = PATIENCE,
        every: int = _EVERY,
        sample: Any = None,
    ) -> None:
        super().__init__()
        if type(every) is not int or not 1 <= every <= LENGTH:
            raise OptionError(
                f"`every` must be a whole number from 1 to {LENGTH}, the steps that "
                f"the optimizer remembers, got {every!r}."
            )
        self.lost = 0  # steps that were overwritten before they were read
        self._episodes = Episodes(on_stuck, patience, logger="buoy.keras")
        self._every = every
        self._sample = sample
        self._trace = trace
        self._recorder = trace if isinstance(trace, Recorder) else None
        self._read = -1  # the last step that was read
        self._pending = 0  # batches since then
        self._since = 0.0
        self._loss: float | None = None
        self._shown: dict[str, float] = {}

    # --- Keras' hooks

    def on_train_begin(self, logs: Any = None) -> None:
        """Open the trace, and read the optimizer's position."""
        del logs
        optimizer = self._optimizer()
        rows = optimizer.rows()
        self._read = rows[-1].step if rows else -1
        self._since = time.time()
        self._show(optimizer)
        if self._recorder is None and self._trace is not None:
            self._recorder = Recorder(self._trace)  # type: ignore[arg-type]
        if self._recorder is not None:
            self._recorder.describe(
                keras=keras.__version__,
                backend=keras.backend.backend(),
                policy=type(optimizer.policy).__name__,
            )

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the batch; read the log when it is time."""
        del batch
        self._loss = (logs or {}).get("loss")
        self._pending += getattr(self._model, "steps_per_execution", 1)
        if self._pending >= self._every:
            self._catch_up()
        if logs is not None:
            logs.update(self._shown)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Read the rest, for the history and TensorBoard."""
        del epoch
        self._catch_up()
        if logs is not None:
            logs.update(self._shown)

    def on_train_end(self, logs: Any = None) -> None:
        """Read the rest, and close a trace that was opened here."""
        del logs
        self._catch_up()
        if self._recorder is not None and self._recorder is not self._trace:
            self._recorder.close()
            self._recorder = None

    # --- reading

    def _optimizer(self) -> LossScaleOptimizer:
        optimizer = self.model.optimizer  # `model` brings JAX's state up to date
        if isinstance(optimizer, LossScaleOptimizer):
            return optimizer
        raise OptionError(
            f"`Watch` reads the log of Buoy's optimizer, but the model has "
            f"{type(optimizer).__name__}. Compile with "
            '`buoy.keras.LossScaleOptimizer("adam")`, call `buoy.keras.use()` before '
            "`compile`, or `buoy.keras.LossScaleOptimizer.adopt(model)` after it."
        )

    def _show(self, optimizer: LossScaleOptimizer) -> None:
        skips = self._episodes.skips
        self._shown = {"loss_scale": optimizer.scale, "skipped_steps": skips}

    def _catch_up(self) -> None:
        """Read the steps since the last read: record them and check for trouble."""
        self._pending = 0
        optimizer = self._optimizer()
        rows = [row for row in optimizer.rows() if row.step > self._read]
        if rows:
            self.lost += rows[0].step - self._read - 1
            now = time.time()
            start = self._since
            self._since = now
            self._read = rows[-1].step
            for i, row in enumerate(rows, 1):
                if self._recorder is not None:
                    feed(self._recorder, row, start + i / len(rows) * (now - start))
            self._note(rows)
        self._show(optimizer)

    def _note(self, rows: list[Row]) -> None:
        for row in rows:  # the layer is named by `_explained`, not by the row
            unnamed = row._replace(offenders=())
            self._episodes.note(unnamed, partial(self._explained, row))

    def _explained(self, row: Row) -> tuple[Verdict, tuple[str, ...]]:
        """Return the verdict of a skip and the layer; this reads all weights."""
        model = self.model
        weights = nonfinite_weights(model)
        if weights:
            return Verdict.POISONED, (layer_of(weights[0]),)
        if self._sample is not None:
            layer = first_nonfinite(model, self._sample)
            if layer is not None:
                return Verdict.FORWARD_NONFINITE, (layer,)
        loss = self._loss if row.loss is None else row.loss
        known = loss is not None and not math.isfinite(loss)
        verdict = Verdict.FORWARD_NONFINITE if known else row.verdict
        # A backward pass runs from the last layer to the first.
        return verdict, tuple(layer_of(path) for path in reversed(row.offenders))
