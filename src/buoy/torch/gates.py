"""Advance schedulers, averages and counters only when the weights moved."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Literal

import torch

from buoy.torch.errors import OptionError
from buoy.torch.gather import parameters_of

__all__ = ["NEVER_STEPS", "AdvanceOn", "Gate", "make_gates"]

AdvanceOn = Literal["applied", "attempted"]

_PATIENCE = 10  # updates without a step of a gate's own optimizer

NEVER_STEPS = (
    "A gate waits for an optimizer that never steps, while another one that holds the "
    "same parameters does: what is gated, a scheduler for one, does not advance. Pass "
    "to `scaler.step` the optimizer that the scheduler was built with, or name the one "
    "to follow: `scaler.gate(scheduler, optimizer=optimizer)`."
)


@dataclass(slots=True)
class Gate:
    """One thing to advance, and when."""

    advance: Callable[[], object]
    optimizer: Any  # None: whichever steps
    attempted: bool
    _idle: int = 0  # updates in which its optimizer did not step, before it ever did

    def follows(self, optimizer: Any) -> bool:
        """Say whether a step of this optimizer, or of a wrapper of it, counts."""
        own = self.optimizer
        if own is None or own is optimizer:
            return True
        groups = getattr(own, "param_groups", None)
        return groups is not None and groups is getattr(optimizer, "param_groups", None)

    def waits_in_vain(self, *, stepped: bool, others: Iterable[Any]) -> bool:
        """Say, once, that others have stepped this gate's parameters all the time."""
        if stepped or self._idle >= _PATIENCE:
            self._idle = _PATIENCE
            return False
        self._idle += 1
        if self._idle < _PATIENCE or not hasattr(self.optimizer, "param_groups"):
            return False
        mine = set(map(id, parameters_of(self.optimizer)))
        return any(
            id(param) in mine
            for optimizer in others
            if optimizer is not None
            for param in parameters_of(optimizer)
        )


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
        Gate(
            _advance(thing),
            getattr(thing, "optimizer", None) if optimizer is None else optimizer,
            attempted,
        )
        for thing in things
    ]


def _advance(thing: Any) -> Callable[[], object]:
    if hasattr(thing, "param_groups"):
        message = (
            f"{type(thing).__name__} cannot be gated: it is an optimizer, and the "
            "scaler steps it itself. Call `scaler.step(optimizer)`, and gate its "
            "scheduler."
        )
        raise OptionError(message)
    if not isinstance(thing, (Mapping, AbstractSet)):
        for name in ("step", "update", "__next__"):
            method = getattr(thing, name, None)
            if callable(method):
                return _alone(thing, method)
    if callable(thing) and not isinstance(thing, torch.nn.Module):
        return _alone(thing, thing)
    message = (
        f"{thing!r} cannot be gated: it has neither `step()` nor `update()` and is no "
        "plain callable. Pass a function without arguments, e.g. "
        "`scaler.gate(lambda: ema.update(model))`."
    )
    raise OptionError(message)


def _alone(thing: Any, method: Callable[..., object]) -> Callable[[], object]:
    """Make sure that it can be called without arguments."""
    try:
        needed = [
            parameter.name
            for parameter in inspect.signature(method).parameters.values()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
    except (TypeError, ValueError):  # it does not tell
        needed = []
    if needed:
        called = getattr(method, "__name__", "it")
        message = (
            f"{type(thing).__name__} cannot be gated as it is: `{called}` needs "
            f"`{needed[0]}`, which `update` does not know. Pass a function that does, "
            f"e.g. `scaler.gate(lambda: scheduler.{called}({needed[0]}))`."
        )
        raise OptionError(message)
    return method
