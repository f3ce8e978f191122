"""Find gradients, weights and optimizer state that are inf or NaN."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from buoy._backends import torch as backend
from buoy._backends.torch.gradients import Gathered, parameters_of

__all__ = ["nonfinite_parameters", "poisoned"]


def poisoned(optimizer: Any) -> bool:
    """Return whether a weight or a state tensor is not finite.  Reads on the host."""
    flags = [
        flag for held in _held(optimizer) if (flag := _is_nonfinite(held)) is not None
    ]
    return any(backend.read(flags))


def _held(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that an optimizer updates: parameters, masters and state."""
    yield from parameters_of(optimizer)
    masters = getattr(optimizer, "_buoy_masters", None)
    yield from () if masters is None else masters.masters
    kept = getattr(optimizer, "state", None)
    for state in kept.values() if isinstance(kept, Mapping) else ():
        if isinstance(state, Mapping):
            yield from filter(torch.is_tensor, tree_leaves(dict(state)))


def _is_nonfinite(value: torch.Tensor) -> torch.Tensor | None:
    """Return whether a tensor is not finite; None if torch cannot compute it."""
    if value.is_meta or not (value.is_floating_point() or value.is_complex()):
        return None
    try:
        return backend.nonfinite(backend.magnitude(value))
    except Exception:  # noqa: BLE001 - unusual state must not stop training
        return None


def nonfinite_parameters(gathered: Gathered) -> list[torch.Tensor]:
    """Return the parameters whose gradients are not finite.  Reads on the host.

    Of sharded gradients only this rank's part is checked.
    """
    grads = gathered.grads
    bad = backend.read([backend.nonfinite(backend.magnitude(g)) for g in grads])
    return [p for p, flag in zip(gathered.params, bad, strict=True) if flag]
