"""Advance schedulers, averages and counters only after applied steps."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from buoy._backends.torch.gradients import parameters_of
from buoy._core.errors import BuoyWarning, OptionError
from buoy._core.warn import warn

__all__ = ["AdvanceOn", "Gate", "make_gates"]

AdvanceOn = Literal["applied", "attempted"]

_METHODS = ("step", "update", "update_parameters", "__next__")
_PATIENCE = 10  # updates without a step of a gate's own optimizer


@dataclass(slots=True)
class Gate:
    """One object to advance, and the optimizer that it follows."""

    advance: Callable[[], object]
    optimizer: Any  # None: all that step
    attempted: bool
    _idle: int = 0  # updates in which its optimizer did not step, before it ever did

    def follows(self, optimizer: Any) -> bool:
        """Return whether a step of this optimizer, or of a wrapper of it, counts."""
        own = self.optimizer
        groups = getattr(own, "param_groups", 0)
        same = own is optimizer or groups is getattr(optimizer, "param_groups", None)
        return same or own is None

    def warn_if_closed(self, *, stepped: bool, others: Iterable[Any]) -> None:
        """Warn, once, if other optimizers keep stepping this gate's parameters."""
        self._idle = _PATIENCE + 1 if stepped else self._idle + 1
        if self._idle != _PATIENCE or not hasattr(self.optimizer, "param_groups"):
            return
        known = [one for one in others if one is not None]
        theirs = {id(param) for one in known for param in parameters_of(one)}
        if not theirs.isdisjoint(map(id, parameters_of(self.optimizer))):
            warn(
                "A gate waits for an optimizer that never steps, while another one "
                "that holds the same parameters does: its scheduler does not advance. "
                "Pass the scheduler's own optimizer to `scaler.step`, or name the one "
                "to follow: `scaler.gate(scheduler, optimizer=optimizer)`.",
                BuoyWarning,
            )


def make_gates(
    things: tuple[Any, ...], optimizer: Any, advance_on: AdvanceOn, model: Any
) -> list[Gate]:
    """Find the method that advances each object; `model` is what averages follow."""
    if advance_on not in ("applied", "attempted"):
        raise OptionError(
            "`advance_on` must be 'applied' (only when the weights changed) or "
            f"'attempted' (at every update), got {advance_on!r}."
        )
    return [
        Gate(
            _advance(thing, model),
            getattr(thing, "optimizer", None) if optimizer is None else optimizer,
            advance_on == "attempted",
        )
        for thing in things
    ]


def _advance(thing: Any, model: Any) -> Callable[[], object]:
    """Return the method that advances an object; raise if it needs an argument."""
    if hasattr(thing, "param_groups"):
        raise OptionError(
            f"{type(thing).__name__} cannot be gated: it is an optimizer. Call "
            "`scaler.step(optimizer)`, which steps it, and gate its scheduler."
        )
    found: list[Any] = []
    if not isinstance(thing, (Mapping, AbstractSet)):
        found = [getattr(thing, name, None) for name in _METHODS]
    if not isinstance(thing, torch.nn.Module):
        found.append(thing)
    advance = next(filter(callable, found), None)
    if advance is None:
        raise OptionError(
            f"{thing!r:.60} cannot be gated: it has neither `step()` nor `update()` "
            "and is not a plain callable. Pass a function without arguments, e.g. "
            "`scaler.gate(lambda: ema.update(model))`."
        )
    needed = _first_argument(advance)
    if needed is None:
        return advance
    if needed == "model" and model is not None:
        return partial(advance, model)
    called = getattr(advance, "__name__", "it")
    name = "scheduler" if called == "step" else "average"
    raise OptionError(
        f"{type(thing).__name__} cannot be gated as it is: `{called}` needs "
        f"`{needed}`, which `update` does not know. Pass a function that does, e.g. "
        f"`scaler.gate(lambda: {name}.{called}({needed}))`."
    )


def _first_argument(function: Callable[..., object]) -> str | None:
    """Return the name of the first required argument; None if there is none."""
    try:
        arguments = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # it has no signature
        return None
    rest = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = (x.name for x in arguments if x.default is x.empty and x.kind not in rest)
    return next(needed, None)
