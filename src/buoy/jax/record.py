"""Record a run from outside of `jit`, without waiting for the device.

The state holds the last steps.  Every `every` steps they are copied to the host, and
read when the next copy is due: by then the copy is complete.
"""

import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

from buoy._core.feed import BINS, Records, feed
from buoy._core.watch import PATIENCE, OnStuck, Watch
from buoy.jax.errors import OptionError
from buoy.jax.find import find
from buoy.jax.leaves import names_of
from buoy.jax.state import LossScaledState
from buoy.jax.step import check_concrete, read_rows
from buoy.trace.counts import Counts

__all__ = ["Feed"]

_EVERY = 16  # steps


class Feed:
    """Write all steps to a `buoy.trace.Recorder`, in batches of `every` steps.

    Call it with the optimizer's state after each step, outside of `jit`; with several
    hosts, on one of them.

    Training is stuck if `patience` steps in a row are skipped, or more than half of
    the last 4 x `patience`, or if `patience` steps in a row have zero gradients.  Then
    `on_stuck` applies: "warn", "raise" a `StuckError`, or a function to call.

    Example:
        >>> import jax.numpy as jnp, optax, tempfile
        >>> import buoy.trace
        >>> from buoy.jax import loss_scaled
        >>> folder = tempfile.TemporaryDirectory()
        >>> tx = loss_scaled(optax.sgd(0.1))
        >>> state = tx.init(jnp.ones(2))
        >>> with buoy.trace.Recorder(folder.name + "/run.buoy") as recorder:
        ...     feed = Feed(recorder)
        ...     for i in range(3):
        ...         _, state = tx.update(jnp.ones(2), state, value=jnp.array(0.5))
        ...         feed(state)
        >>> [row.loss for row in buoy.trace.load(recorder.path).rows]
        [0.5, 0.5, 0.5]
        >>> folder.cleanup()
    """

    def __init__(
        self,
        recorder: Records,
        *,
        every: int = _EVERY,
        on_stuck: OnStuck = "warn",
        patience: int = PATIENCE,
    ) -> None:
        if type(every) is not int or every < 1:
            message = f"`every` must be a whole number of steps, got {every!r}."
            raise OptionError(message)
        self.every = every
        self.lost = 0  # steps that were overwritten before they were read
        self._recorder = recorder
        self._calls = 0
        self._written = -1  # the last recorded step; -1 before any
        self._latest: LossScaledState | None = None
        self._copied: LossScaledState | None = None
        self._since = time.time()
        self._watch = Watch(on_stuck, patience, logger="buoy.jax")
        attach: Any = getattr(recorder, "attach", None)
        if attach is not None:
            attach(self.flush)

    def __call__(self, opt_state: optax.OptState) -> None:
        """Take the state after a step."""
        state = find(opt_state)
        check_concrete(state, "Feed")
        if self._calls == 0:
            self._begin(state)
        self._calls += 1
        self._latest = state
        if self._calls % self.every == 0:
            self._write(self._copied)
            self._copied = _copy(state)

    def gradients(self, opt_state: optax.OptState, grads: optax.Updates) -> None:
        """Record the exponents of these scaled gradients, e.g. every hundred steps.

        `opt_state` must be the state that they were computed with.
        """
        state = find(opt_state)
        counted = jax.device_get(_exponents(jax.tree.leaves(grads)))
        sizes = [leaf.size for leaf in jax.tree.leaves(grads)]
        tensors = {
            name: Counts.of_exponents(bins.tolist(), size)
            for name, bins, size in zip(names_of(grads), counted, sizes, strict=True)
        }
        recorder: Any = self._recorder
        recorder.histograms(int(state.steps), float(state.scaling.scale), tensors)

    def flush(self) -> None:
        """Write all pending steps; this waits for the last one."""
        latest = self._latest
        self._latest = None
        if latest is not None and not _is_deleted(latest.rows):
            self._write(latest)
        else:
            self._write(self._copied)
        self._copied = None

    def _begin(self, state: LossScaledState) -> None:
        history = state.rows.shape[-2]
        if self.every > history:
            message = (
                f"`every` is {self.every}, but the state keeps only {history} steps: "
                "the others would be lost. Pass a smaller `every`, or a larger "
                "`history` to `loss_scaled`."
            )
            raise OptionError(message)
        describe = getattr(self._recorder, "describe", None)
        if describe is not None:
            describe(
                jax=jax.__version__,
                device=jax.default_backend(),
                rank=jax.process_index(),
                world=jax.process_count(),
                policy=type(state.plan.policy).__name__,
            )

    def _write(self, state: LossScaledState | None) -> None:
        if state is None:
            return
        rows = [row for row in read_rows(state) if row.step > self._written]
        if not rows:
            return
        if self._written >= 0:
            self.lost += rows[0].step - self._written - 1
        now = time.time()
        for i, row in enumerate(rows, 1):
            share = i / len(rows)
            feed(self._recorder, row, self._since + share * (now - self._since))
        self._since = now
        self._written = rows[-1].step
        for row in rows:
            self._watch.note(row)


def _is_deleted(array: Any) -> bool:
    """Return whether this array was donated to a later step."""
    return isinstance(array, jax.Array) and array.is_deleted()


@jax.jit
def _duplicate(arrays: Any) -> Any:
    return jax.tree.map(jnp.copy, arrays)


def _copy(state: LossScaledState) -> LossScaledState:
    """Copy the ring buffers, which the next step may overwrite, to the host."""
    steps, rows, bad = _duplicate((state.steps, state.rows, state.bad))
    for array in (steps, rows, bad):
        array.copy_to_host_async()
    return LossScaledState(None, None, steps, rows, bad, state.plan)


@jax.jit
def _exponents(leaves: list[jax.Array]) -> list[jax.Array]:
    """Count float32's exponent fields in each leaf."""
    found = []
    for leaf in leaves:
        word = jax.lax.bitcast_convert_type(
            jnp.abs(leaf).astype(jnp.float32), jnp.int32
        )
        found.append(jnp.bincount(jnp.ravel(word >> 23), length=BINS))
    return found
