"""Warn about gradients that never carried the scale.

Gradients of plain `jax.value_and_grad` look like any others, and no state can mark
them: they may come from another compiled function or another device.  But they carry
the scale only if something has read it.  So the reads are noted per plan, while
functions are traced, and an update before any read is reported.
"""

from collections import Counter
from typing import Any

import jax

from buoy._core.policies.static import NoScaling
from buoy._core.warn import warn
from buoy.jax.state import Plan

__all__ = ["check_read", "note_read"]

_EAGER = 8  # updates outside of `jit` before the warning: a few may be hand-made
_READ: set[int] = set()  # digests of plans
_UPDATES: Counter[int] = Counter()


def note_read(plan: Plan) -> None:
    """Note that the scale of such a state was read, to multiply a loss by it."""
    _READ.add(plan.digest)


def check_read(plan: Plan, leaves: list[Any]) -> None:
    """Warn once if gradients arrive and the scale has never been read."""
    if plan.digest in _READ or isinstance(plan.policy, NoScaling):
        return
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
    _UPDATES[plan.digest] += _EAGER if traced else 1
    if _UPDATES[plan.digest] < _EAGER:
        return
    note_read(plan)
    warn(
        "Nothing in this process has read the scale, but `loss_scaled` divides these "
        "gradients by it. Gradients of plain `jax.value_and_grad` or `jax.grad` are "
        "not multiplied by the scale: they would become so small that nothing is "
        "learned. Use `buoy.jax.value_and_grad(loss_fn)(opt_state, params, batch)`, or "
        "multiply the loss by `buoy.jax.scale_of(opt_state)`. If another process does "
        "that, call `scale_of(opt_state)` here once."
    )
