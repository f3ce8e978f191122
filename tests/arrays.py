"""Run a policy over many event sequences at once, on each array backend."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import buoy
from buoy._core.state import map_state


@dataclass(frozen=True)
class Ran:
    """What came out: arrays of [steps, sequences]."""

    scales: np.ndarray
    collapsed: np.ndarray


def run_numpy(policy: Any, finite: np.ndarray, amax: np.ndarray | None) -> Ran:
    """Run eagerly on NumPy arrays."""
    from buoy._backends.numpy import lift, ops

    def wide(value: Any) -> np.ndarray:
        number = lift(value, policy.precision)
        return np.full(finite.shape[1], number, number.dtype)

    with np.errstate(all="ignore"):
        return _loop(
            policy, map_state(wide, policy.init()), finite, amax, ops(), _as_is
        )


def run_torch(policy: Any, finite: np.ndarray, amax: np.ndarray | None) -> Ran:
    """Run eagerly on torch: side by side, or 0-d where it is pow that counts."""
    import torch

    from buoy._backends.torch import lift, ops

    def run(state: Any, rows: np.ndarray, sizes: np.ndarray | None) -> Ran:
        with torch.no_grad():
            return _loop(policy, state, rows, sizes, ops(), torch.as_tensor)

    state = map_state(lambda value: lift(value, policy.precision), policy.init())
    if getattr(policy, "growth_step", None) is None:
        columns = finite.shape[1]
        state = map_state(lambda number: number.expand(columns).clone(), state)
        return run(state, finite, amax)
    parts = [run(state, column, None) for column in finite.T]
    return Ran(
        np.stack([part.scales for part in parts], axis=1),
        np.stack([part.collapsed for part in parts], axis=1),
    )


def run_jax(policy: Any, finite: np.ndarray, amax: np.ndarray | None) -> Ran:
    """Run under jit and scan, in float64 that holds float32 values: all of float32."""
    import jax

    with jax.enable_x64(True):
        return _scan(policy, finite, amax, "float64", wide=True)


def run_jax_single(policy: Any, finite: np.ndarray, amax: np.ndarray | None) -> Ran:
    """Run under jit and scan as users do: float32, x64 off."""
    return _scan(policy, finite, amax, "float32", wide=False)


def _scan(
    policy: Any,
    finite: np.ndarray,
    amax: np.ndarray | None,
    precision: Any,
    *,
    wide: bool,
) -> Ran:
    import jax

    from buoy._backends.jax import lift, ops, register

    functions = ops(wide=wide)

    def spread(value: Any) -> jax.Array:
        return jax.numpy.broadcast_to(lift(value, precision), finite.shape[1:])

    def step(state: Any, row: Any) -> Any:
        seen = _seen(row[0], None if amax is None else row[1], state, functions)
        state = policy.update(state, seen, ops=functions)
        return state, (state.scale, getattr(state, "collapsed", None))

    state = map_state(spread, policy.init())
    register(type(state))
    rows = (finite,) if amax is None else (finite, amax)
    scanned = jax.jit(lambda first, xs: jax.lax.scan(step, first, xs))(state, rows)
    scales, collapsed = scanned[1]
    return Ran(np.asarray(scales), _flags(collapsed, finite))


BACKENDS = {"numpy": run_numpy, "torch": run_torch, "jax": run_jax}


def _as_is(row: np.ndarray) -> np.ndarray:
    return row


def _loop(
    policy: Any,
    state: Any,
    finite: np.ndarray,
    amax: np.ndarray | None,
    ops: Any,
    lift: Callable[[np.ndarray], Any],
) -> Ran:
    scales, flags = [], []
    for index in range(len(finite)):
        size = None if amax is None else lift(amax[index])
        seen = _seen(lift(finite[index]), size, state, ops)
        state = policy.update(state, seen)
        scales.append(np.asarray(state.scale))
        flags.append(getattr(state, "collapsed", None))
    collapsed = None if flags[0] is None else [np.asarray(flag) for flag in flags]
    return Ran(np.stack(scales), _flags(collapsed, finite))


def _seen(finite: Any, amax: Any, state: Any, ops: Any) -> buoy.Seen:
    if amax is None:
        return buoy.Seen(finite=finite)
    scaled = amax + ops.log2(ops.cast(state.scale, "float64"))
    return buoy.Seen(finite=finite, amax_log2=scaled)


def _flags(collapsed: Any, finite: np.ndarray) -> np.ndarray:
    return np.zeros(finite.shape, bool) if collapsed is None else np.asarray(collapsed)
