"""Why a step was skipped, from facts that cost nothing while nothing happens.

Asked only after a skip.  In order: the gradients of the last skip were never cleared;
the weights or the optimizer's state are non-finite themselves; the loss was non-finite
before it was scaled; the loss has been climbing; this batch's loss stands out; and
else the scale was too high, which is normal.
"""

from collections.abc import Iterator, Mapping, Sequence
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
    losses: Sequence[float | torch.Tensor],
    history: Sequence[float | torch.Tensor],
    *,
    stale: bool,
    sound: bool = False,
) -> Verdict:
    """Name the cause of a skip.  Reads on the host.

    `sound`: weights and state were looked at before, and no step was applied since.
    """
    if stale:
        return Verdict.STALE_GRADS
    if not (sound or optimizer is None) and poisoned(optimizer):
        return Verdict.POISONED
    return judge_losses(backend.read(list(losses)), backend.read(list(history)))


def poisoned(optimizer: Any) -> bool:
    """Say whether a weight or a state tensor is non-finite.  Reads on the host."""
    flags = [flag for held in _held(optimizer) if (flag := _spoilt(held)) is not None]
    return any(backend.read(flags))


def _held(optimizer: Any) -> Iterator[torch.Tensor]:
    """Go through what an optimizer updates, as far as it lets us."""
    yield from parameters_of(optimizer)
    masters = masters_of(optimizer)
    yield from () if masters is None else masters.masters
    kept = getattr(optimizer, "state", None)
    for state in kept.values() if isinstance(kept, Mapping) else ():
        if isinstance(state, Mapping):
            yield from filter(torch.is_tensor, state.values())


def _spoilt(value: torch.Tensor) -> torch.Tensor | None:
    """Say whether a tensor is non-finite; None where torch cannot tell."""
    if value.is_meta or not (value.is_floating_point() or value.is_complex()):
        return None
    try:
        return backend.nonfinite(backend.magnitude(value))
    except Exception:  # noqa: BLE001 - a state of any kind must not end the training
        return None
