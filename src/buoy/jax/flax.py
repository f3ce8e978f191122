"""Let flax's `to_bytes` and `from_bytes` carry our states, where flax is loaded.

Flax asks a table of its own which classes it may take apart.  It is never imported
from here: who has not loaded it needs no entry, and who has gets it on first use.
"""

import sys
from dataclasses import fields, replace
from typing import Any

from buoy.jax.errors import StructureError
from buoy.jax.masters import MasterState
from buoy.jax.state import LossScaledState

__all__ = ["introduce"]

_KNOWN: set[type[Any]] = set()


def introduce(state: LossScaledState) -> LossScaledState:
    """Tell flax of the classes in a state, once, and hand the state back."""
    serialization: Any = sys.modules.get("flax.serialization")
    if serialization is None:
        return state
    for kind in {LossScaledState, MasterState, type(state.scaling)} - _KNOWN:
        serialization.register_serialization_state(
            kind, _taken_apart, _put_together, override=True
        )
        _KNOWN.add(kind)
    return state


def _names(state: Any) -> list[str]:
    return [f.name for f in fields(state) if not f.metadata.get("static")]


def _taken_apart(state: Any) -> dict[str, Any]:
    """Give the fields that are arrays; the plan belongs to the program."""
    to_state_dict = sys.modules["flax.serialization"].to_state_dict
    return {name: to_state_dict(getattr(state, name)) for name in _names(state)}


def _put_together(target: Any, held: dict[str, Any]) -> Any:
    names = _names(target)
    if set(names) != set(held):
        kind = type(target).__name__
        message = (
            f"What was saved is no {kind}: it holds {', '.join(sorted(held))}, and "
            f"{', '.join(sorted(names))} are needed. Build `loss_scaled` with the "
            "policy and the inner transformation that were saved."
        )
        raise StructureError(message)
    from_state_dict = sys.modules["flax.serialization"].from_state_dict
    return replace(
        target,
        **{n: from_state_dict(getattr(target, n), held[n], name=n) for n in names},
    )
