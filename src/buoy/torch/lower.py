"""Set a scale within an iteration, and let the policy go on from there."""

import math
from dataclasses import fields, replace
from typing import TYPE_CHECKING

import torch

from buoy.torch.rule import Classic

if TYPE_CHECKING:
    from buoy.torch.contract import Contract

__all__ = ["fitting", "lower", "set_scale"]

_FP16_MAX_LOG2 = 16  # 65504 lies just below 2^16


def set_scale(scaler: "Contract", value: float) -> None:
    """Set the scale; what a policy has learnt beyond it stays."""
    rule, held = scaler._rule, scaler._scale
    if held is None:
        return
    if isinstance(rule, Classic):
        value = min(max(value, rule.low), rule.high)
        held.fill_(value)
        rule.assign(scaler, value)
        return
    if all(field.name != "scale" for field in fields(rule.state)):
        rule.assign(scaler, value)
        return
    value = max(value, getattr(rule.rule, "min_scale", 0.0))
    number: float | torch.Tensor = value
    if isinstance(rule.state.scale, torch.Tensor):
        number = torch.full_like(rule.state.scale, value)
    rule.state = replace(rule.state, scale=number)
    held.fill_(value)


def lower(scaler: "Contract", failed: float, tries: int) -> float:
    """Go below a scale that overflowed: by 1, then 2, 4, 8, ... binades."""
    known = scaler._rule.known(scaler)
    now = scaler.get_scale() if known is None else known
    wanted = min(now, math.ldexp(failed, -(2**tries)))
    if wanted < now:
        set_scale(scaler, wanted)
    return scaler.get_scale()


def fitting(amax: float, below: float) -> float | None:
    """Give the power of two that leaves one bit above the largest gradient.

    `amax` is unscaled.  Never `below` or more: that scale has just overflowed.
    """
    if not (amax > 0.0 and math.isfinite(amax)):
        return None
    exponent = _FP16_MAX_LOG2 - 1 - math.frexp(amax)[1]
    return min(math.ldexp(1.0, exponent), below / 2.0)
