"""Advance schedulers, averages and counters only when the weights moved."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

from buoy.torch.errors import OptionError

__all__ = ["AdvanceOn", "Gate", "make_gates"]

AdvanceOn = Literal["applied", "attempted"]


class Gate(NamedTuple):
    """One thing to advance, and when."""

    advance: Callable[[], object]
    optimizer: Any  # None: whichever steps
    attempted: bool


def make_gates(
    things: tuple[Any, ...], optimizer: Any, advance_on: AdvanceOn
) -> list[Gate]:
    """Find out how each thing is advanced."""
    if advance_on not in ("applied", "attempted"):
        message = (
            "`advance_on` must be 'applied' (only when the weights moved) or "
            f"'attempted' (at every update), got {advance_on!r}."
        )
        raise OptionError(message)
    attempted = advance_on == "attempted"
    return [
        Gate(_advance(thing), optimizer or getattr(thing, "optimizer", None), attempted)
        for thing in things
    ]


def _advance(thing: Any) -> Callable[[], object]:
    for name in ("step", "update", "__next__"):
        method = getattr(thing, name, None)
        if callable(method) and not isinstance(thing, dict):
            found: Callable[[], object] = method
            return found
    if callable(thing) and not isinstance(thing, torch.nn.Module):
        called: Callable[[], object] = thing
        return called
    message = (
        f"{thing!r} cannot be gated: it has neither `step()` nor `update()` and is no "
        "plain callable. Pass a function without arguments, e.g. "
        "`scaler.gate(lambda: ema.update(model))`."
    )
    raise OptionError(message)
