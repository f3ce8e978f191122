"""Why a step was skipped, from facts that cost nothing while nothing happens.

Asked only after a skip.  In order: the gradients of the last skip were never cleared;
the weights or the optimizer's state are non-finite themselves; the loss was non-finite
before it was scaled; the loss has been climbing; this batch's loss stands out; and
else the scale was too high, which is normal.
"""

from collections.abc import Sequence
from typing import Any

import torch

from buoy._backends import torch as backend
from buoy._core.state import Verdict
from buoy._core.verdicts import EXPLAINED, HISTORY, judge_losses
from buoy.torch.gather import parameters_of
from buoy.torch.masters import masters_of

__all__ = ["EXPLAINED", "HISTORY", "judge", "poisoned"]


def judge(
    optimizer: Any,
    losses: Sequence[torch.Tensor],
    history: Sequence[torch.Tensor],
    *,
    stale: bool,
) -> Verdict:
    """Name the cause of a skip.  Reads on the host."""
    if stale:
        return Verdict.STALE_GRADS
    if optimizer is not None and poisoned(optimizer):
        return Verdict.POISONED
    return judge_losses(backend.read(list(losses)), backend.read(list(history)))


def poisoned(optimizer: Any) -> bool:
    """Say whether a weight or a state tensor is non-finite.  Reads on the host."""
    masters = masters_of(optimizer)
    held = [param.detach() for param in parameters_of(optimizer)]
    held += [] if masters is None else masters.masters
    for state in getattr(optimizer, "state", {}).values():
        if isinstance(state, dict):
            held += [value for value in state.values() if torch.is_tensor(value)]
    flags = [
        torch.isfinite(value._values() if value.is_sparse else value).all()
        for value in map(backend.local, held)
        if value.is_floating_point() or value.is_complex()
    ]
    return not all(backend.read(flags))
