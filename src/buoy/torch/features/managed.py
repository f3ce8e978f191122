"""A scaler whose methods are called by a training library: `GradScaler(managed=True)`.

Accelerate, Lightning and others wrap each optimizer.  They call `update` after each
one's step, may unscale twice, and take a step for skipped if `optimizer.step` was not
called.  With `managed`

* `update` is deferred until the next `scale`, `get_scale`, `state_dict` or second step
  of an optimizer, until the trace is closed, or until the program ends: all optimizers
  of an iteration are divided by one scale, and it moves once;
* `optimizer.step` is not called for a skipped step, also if the optimizer is fused,
  which costs one host read (`optimizers.hand_over`);
* `unscale_` of unscaled gradients does nothing.
"""

import atexit
from typing import Any
from weakref import WeakSet

from torch.amp.grad_scaler import OptState

from buoy.torch import errors
from buoy.torch.hooks import Scaler

__all__ = ["defer", "flush", "is_unscaled"]

_deferring: "WeakSet[Scaler]" = WeakSet()  # scalers that have deferred an update


def defer(scaler: Scaler) -> None:
    """Defer an update of the scale."""
    pendings = scaler._per_optimizer_states.values()
    # What ranks have not agreed on may have gradients on another rank.
    if not any(one.flags or not one.agreed for one in pendings):
        raise errors.nothing_recorded()
    scaler._iteration.deferred = True
    if not _deferring:
        # Registered now, and not at import, to be called before the trace is closed.
        atexit.unregister(flush)
        atexit.register(flush)
    _deferring.add(scaler)


def flush() -> None:
    """Carry out the deferred updates, which make rows of traces."""
    for scaler in list(_deferring):
        scaler._flush()


def is_unscaled(scaler: Scaler, optimizer: Any) -> bool:
    """Return whether the gradients of an optimizer were unscaled in this iteration."""
    stage = scaler._per_optimizer_states[id(optimizer)].stage
    # A stage of a pipeline scales no loss: after its step come gradients of the next.
    stepped = stage is OptState.STEPPED and scaler._iteration.scalings
    return stage is OptState.UNSCALED or bool(stepped)
