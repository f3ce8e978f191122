"""Support flax's `to_bytes` and `from_bytes` for our states.

Flax needs every class in its own registry.  This module never imports flax: if it is
already imported, the classes are registered on first use.
"""

import sys
from dataclasses import fields, replace
from typing import Any

from buoy._core.state import parts
from buoy.jax.errors import StructureError
from buoy.jax.masters import MasterState
from buoy.jax.state import LossScaledState

__all__ = ["register_with_flax"]

_KNOWN: set[type[Any]] = set()


def register_with_flax(state: LossScaledState) -> LossScaledState:
    """Register the classes of a state with flax, once; return the state."""
    serialization: Any = sys.modules.get("flax.serialization")
    if serialization is None:
        return state
    of_policy = map(type, parts(state.scaling))
    for kind in {LossScaledState, MasterState, *of_policy} - _KNOWN:
        serialization.register_serialization_state(
            kind, _to_dict, _from_dict, override=True
        )
        _KNOWN.add(kind)
    return state


def _names(state: Any) -> list[str]:
    return [f.name for f in fields(state) if not f.metadata.get("static")]


def _to_dict(state: Any) -> dict[str, Any]:
    """Return the fields that hold arrays; the plan is not saved."""
    to_state_dict = sys.modules["flax.serialization"].to_state_dict
    return {name: to_state_dict(getattr(state, name)) for name in _names(state)}


def _from_dict(target: Any, held: Any) -> Any:
    names = _names(target)
    kind = type(target).__name__
    if not isinstance(held, dict):
        message = (
            f"The saved state is not a {kind}: it is {held!r:.60}. Pass what flax's "
            "`to_state_dict` or `to_bytes` returned for such a state."
        )
        raise StructureError(message)
    if set(names) != set(held):
        message = (
            f"The saved state is not a {kind}: it holds "
            f"{', '.join(sorted(map(str, held)))}, but {', '.join(sorted(names))} are "
            "needed. Build `loss_scaled` with the policy and the inner transformation "
            "that were saved."
        )
        raise StructureError(message)
    from_state_dict = sys.modules["flax.serialization"].from_state_dict
    return replace(
        target,
        **{n: from_state_dict(getattr(target, n), held[n], name=n) for n in names},
    )
