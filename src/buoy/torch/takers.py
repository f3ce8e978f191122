"""Who takes `grad_scale` and `found_inf`: an optimizer itself, or those inside of it.

Torch sets both on whatever it is given.  A wrapper that says that it supports scaling
only because it passes such questions on to the optimizer inside would leave them
unread there, and a whole step would be taken with gradients times the scale.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from buoy.torch.gather import parameters_of

__all__ = [
    "Takers",
    "can_be_told",
    "hands_over",
    "takers",
    "takes_scaler",
    "unscales_in_place",
]

_DECLARED = "_step_supports_amp_scaling"
_TORCHS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
_PLAIN = frozenset(_TORCHS)


class Takers(NamedTuple):
    """Whom to hand what the scaler knows."""

    found: tuple[Any, ...]  # none: it cannot be told who would read it
    sure: bool  # each divides its own gradients, once; else they get unscaled ones


_KNOWN: WeakKeyDictionary[Any, Takers] = WeakKeyDictionary()


def hands_over(optimizer: Any) -> bool:
    """Say whether an optimizer divides by what it is handed, or one inside of it."""
    if not getattr(optimizer, _DECLARED, False):
        return False
    return not takes_scaler(optimizer) and takers(optimizer).sure


def can_be_told(optimizer: Any) -> bool:
    """Say whether an optimizer knows of scaling, and somebody would hear of it."""
    if not getattr(optimizer, _DECLARED, False):
        return False
    if type(optimizer) in _PLAIN:
        return True
    return takes_scaler(optimizer) or bool(takers(optimizer).found)


def takers(optimizer: Any) -> Takers:
    """Find them, for an optimizer that says that it supports scaling."""
    if type(optimizer) in _PLAIN:
        return Takers((optimizer,), sure=True)
    try:
        found = _KNOWN.get(optimizer)
        if found is None:
            found = _KNOWN[optimizer] = _look_for(optimizer)
    except TypeError:  # cannot be referred to weakly: look every time
        return _look_for(optimizer)
    return found


def _look_for(optimizer: Any) -> Takers:
    inside = tuple(one for one in _held_by(optimizer) if getattr(one, _DECLARED, False))
    if _declares(optimizer):
        # It may read both itself or leave that to the one inside.
        return Takers((optimizer, *inside), sure=not inside)
    own = getattr(getattr(optimizer, "step", None), "__self__", optimizer)
    if own is not optimizer:  # even `step` is that of the one inside
        inside = (own,) if getattr(own, _DECLARED, False) else ()
    found = [takers(one) for one in inside]
    sure = all(one.sure for one in found) and _share_all(optimizer, inside)
    return Takers(tuple(taker for one in found for taker in one.found), sure=sure)


def _declares(optimizer: Any) -> bool:
    """Say whether support is its own word, not one that it passes on."""
    if _DECLARED in getattr(optimizer, "__dict__", ()):
        return True
    for kind in type(optimizer).__mro__:
        if _DECLARED in vars(kind):
            return not isinstance(vars(kind)[_DECLARED], property)
    return False


def _held_by(optimizer: Any) -> Iterator[Any]:
    """Go through the optimizers that one holds, in attributes or lists of them."""
    for name, value in list(getattr(optimizer, "__dict__", {}).items()):
        if name in ("param_groups", "state", "defaults"):
            continue
        several = isinstance(value, (list, tuple))
        for one in value if several else (value,):
            if one is not optimizer and hasattr(one, "param_groups"):
                yield one


def _share_all(optimizer: Any, inside: tuple[Any, ...]) -> bool:
    """Say whether every parameter belongs to exactly one of those inside."""
    own = [id(param) for one in inside for param in parameters_of(one)]
    return sorted(own) == sorted(map(id, parameters_of(optimizer)))


def takes_scaler(optimizer: Any) -> bool:
    """Say whether an optimizer's `step` wants the scaler itself: torch's first way."""
    if type(optimizer) in _PLAIN and "step" not in optimizer.__dict__:
        return False
    step = getattr(optimizer.step, "__func__", optimizer.step)
    try:
        found = _TAKES_SCALER.get(step)
        if found is None:
            found = "grad_scaler" in inspect.signature(step).parameters
            _TAKES_SCALER[step] = found
    except TypeError:  # cannot be referred to weakly: look every time
        return "grad_scaler" in inspect.signature(step).parameters
    return found


_TAKES_SCALER: WeakKeyDictionary[Callable[..., Any], bool] = WeakKeyDictionary()


def unscales_in_place(optimizer: Any) -> bool:
    """Say whether a step that is applied leaves unscaled gradients in `.grad`.

    Torch's own kernels do; of others nobody knows.
    """
    return all(
        any(getattr(type(one), "step", None) is kind.step for kind in _TORCHS)
        for one in takers(optimizer).found
    )
