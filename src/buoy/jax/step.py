"""The outcome of the last steps, read from the device."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from buoy._core.errors import DeviceModeError
from buoy._core.ring import COLUMNS, rows_of
from buoy._core.step import Row
from buoy._core.verdicts import Verdict
from buoy.jax.errors import NoStepError, StructureError
from buoy.jax.find import find
from buoy.jax.leaves import dtype_of
from buoy.jax.state import LossScaledState

__all__ = ["applied_of", "check_concrete", "last_step", "read_rows"]


def applied_of(opt_state: optax.OptState) -> jax.Array:
    """Return whether the last update was applied: bool [], also under `jit`.

    Use it for what must not advance on skipped steps: averages of weights, counters,
    schedules outside of the inner transformation.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from buoy.jax import loss_scaled
        >>> tx = loss_scaled(optax.sgd(0.1))
        >>> _, state = tx.update(jnp.ones(2) / 0, tx.init(jnp.ones(2)))
        >>> applied_of(state)
        Array(False, dtype=bool)
    """
    state = find(opt_state)
    last = (state.steps - 1) % state.rows.shape[-2]
    column = state.rows[..., COLUMNS.index("applied")]
    return jnp.take_along_axis(column, last[..., None], axis=-1)[..., 0] == 1


def last_step(opt_state: optax.OptState, params: optax.Params = None) -> Row:
    """Return the outcome of the last step; this waits for the device.

    If you pass `params`, the verdict also detects non-finite weights.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from buoy.jax import loss_scaled
        >>> tx = loss_scaled(optax.sgd(0.1), "backoff")
        >>> params = {"w": jnp.ones(2), "b": jnp.ones(1)}
        >>> grads = {"w": jnp.ones(2) / 0, "b": jnp.ones(1)}
        >>> _, state = tx.update(grads, tx.init(params), params)
        >>> step = last_step(state)
        >>> step.applied, step.verdict.value, step.offenders, step.next_scale
        (False, 'scale_too_high', ('w',), 32768.0)
    """
    state = find(opt_state)
    check_concrete(state, "last_step")
    rows = read_rows(state)
    if not rows:
        message = (
            "No step has been taken with this state yet. Call `tx.update` first, "
            "and pass the state that it returned."
        )
        raise NoStepError(message)
    gave_up = getattr(state.scaling, "collapsed", None)
    last = rows[-1]._replace(collapsed=gave_up is not None and bool(gave_up))
    if last.skipped and _poisoned(state.inner, params):
        last = last._replace(verdict=Verdict.POISONED)
    return last


def check_concrete(state: LossScaledState, caller: str) -> None:
    """Raise if the state is traced: its numbers do not exist yet."""
    if isinstance(state.steps, jax.core.Tracer):
        message = (
            f"`{caller}` needs the values of a step, but this state is traced, inside "
            "`jit`, `scan` or another transformation. Return the state and call "
            f"`{caller}` outside. Inside, use `applied_of(opt_state)` and "
            "`scale_of(opt_state)`, which are arrays."
        )
        raise DeviceModeError(message)


def read_rows(state: LossScaledState) -> list[Row]:
    """Read the steps that a state holds, oldest first, in one transfer."""
    if jnp.ndim(state.steps):
        message = (
            f"This state holds {state.steps.size} models or devices, because it was "
            "made under `vmap` or `pmap`; `last_step` reads one. Pass one, for example "
            "`jax.tree.map(lambda x: x[0], opt_state)`."
        )
        raise StructureError(message)
    steps, rows, bad = jax.device_get((state.steps, state.rows, state.bad))
    return rows_of(int(steps), rows, bad, state.plan.names)


def _poisoned(inner: Any, params: optax.Params) -> bool:
    return not bool(_sound(_floats(inner), _floats(params)))


def _floats(tree: Any) -> list[jax.Array]:
    return [
        leaf
        for leaf in jax.tree.leaves(tree)
        if jnp.issubdtype(dtype_of(leaf) or jnp.int32, jnp.inexact)
    ]


@jax.jit
def _sound(inner: list[jax.Array], params: list[jax.Array]) -> jax.Array:
    # A scalar of an optimizer's state may start at inf, as the best loss so far does in
    # `optax.contrib.reduce_on_plateau`.
    scalars = [jnp.logical_not(jnp.isnan(x)) for x in inner if not jnp.ndim(x)]
    arrays = [x for x in inner if jnp.ndim(x)] + params
    flags = scalars + [jnp.all(jnp.isfinite(array)) for array in arrays]
    return jnp.all(jnp.stack(flags)) if flags else jnp.ones((), jnp.bool_)
