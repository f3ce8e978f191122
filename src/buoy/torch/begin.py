"""Begin a policy's state at a scale that only the device knows."""

import math
from dataclasses import fields, replace
from typing import Any

import torch

from buoy._backends import torch as backend
from buoy._core.errors import PolicyError

__all__ = ["begun_on_device"]


def begun_on_device(
    rule: Any, scale: torch.Tensor, low: float, high: float
) -> Any | None:
    """Make the state of a policy that starts at this scale, without reading it.

    How a state depends on where it starts is learnt from two other starts: a field is
    the scale, its logarithm, or the same for all.  None if one is something else.
    """
    first = 2.0 ** math.ceil(math.log2(low))
    if first * 2.0 > high:
        return None
    one, two = (_started(rule, start) for start in (first, first * 2.0))
    if one is None or two is None:
        return None
    start = scale.clamp(low, high)
    if _started(rule, first * 1.5) is None:  # it takes powers of two only
        start = torch.ldexp(torch.ones_like(start), torch.frexp(start).exponent - 1)
    start = backend.ops().cast(start, rule.precision)
    begun = {}
    for field in fields(one):
        pair = getattr(one, field.name), getattr(two, field.name)
        if pair == (first, first * 2.0):
            begun[field.name] = start
        elif pair == (math.log2(first), math.log2(first) + 1.0):
            begun[field.name] = torch.log2(start)
        elif pair[0] != pair[1]:
            return None
        elif pair[0] is not None:
            begun[field.name] = backend.lift(pair[0], rule.precision, scale.device)
    return replace(one, **begun)


def _started(rule: Any, start: float) -> Any | None:
    try:
        return replace(rule, init_scale=start).init()
    except (TypeError, PolicyError):
        return None
