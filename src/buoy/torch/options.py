"""Turn a scaler's arguments into its rule, refusing what cannot work."""

import math
from typing import Any

import torch

from buoy._core.policies.policy import Policy
from buoy._core.policies.registry import policy as make_policy
from buoy.torch.errors import FactorError, OptionError
from buoy.torch.governed import Governed
from buoy.torch.rule import FLOAT32_MAX, MIN_SCALE, SMALLEST, Classic

__all__ = [
    "DEFAULTS",
    "check",
    "heals",
    "limit",
    "never_syncs",
    "rule",
    "shared_order",
]

DEFAULTS = {
    "init_scale": 2.0**16,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
}


def check(given: dict[str, Any], *, strict: bool) -> None:
    """Refuse factors and scales with which the scale could only go wrong."""
    if not strict:
        _check_kinds(given)
    if not given["growth_factor"] > 1.0:
        message = (
            "The growth factor must be > 1.0. With `growth_factor`="
            f"{given['growth_factor']!r} the scale could never grow back."
        )
        raise FactorError(message)
    if not given["backoff_factor"] < 1.0:
        message = (
            "The backoff factor must be < 1.0. With `backoff_factor`="
            f"{given['backoff_factor']!r} an overflow would never end."
        )
        raise FactorError(message)
    if strict:
        return
    for name in ("init_scale", "backoff_factor"):
        value = given[name]
        least = SMALLEST if name == "init_scale" else 2.0**-149
        if not least <= value <= FLOAT32_MAX:
            message = (
                f"`{name}` must be a positive number that float32 can hold, got "
                f"{value!r}: gradients divided by such a scale would be inf or NaN."
            )
            raise OptionError(message)


def _check_kinds(given: dict[str, Any]) -> None:
    for name, value in given.items():
        whole = name == "growth_interval"
        if not hasattr(value, "__index__" if whole else "__float__"):
            kind = "a whole number of steps" if whole else "a number"
            message = (
                f"`{name}` must be {kind}, e.g. {DEFAULTS[name]:g}, got {value!r}. A "
                "value read from a file or a command line is text until it is "
                f"converted: `{'int' if whole else 'float'}({name})`."
            )
            raise OptionError(message)


def rule(
    policy: str | Policy | None,
    given: dict[str, Any],
    *,
    low: float | None,
    high: float | None,
    strict: bool,
) -> Classic | Governed:
    """Make what moves the scale."""
    _check_bounds(low, high)
    if policy is None and not strict:
        _check_start(given["init_scale"], low, high)
    if policy is None:
        return _classic(given["init_scale"], low, high, strict=strict)
    changed = {name: x for name, x in given.items() if DEFAULTS[name] != x}
    if low is not None:
        changed["min_scale"] = low
    if high is not None:
        changed["max_scale"] = high
    return Governed(make_policy(policy, **changed), strict=strict)


def _classic(
    init: float, low: float | None, high: float | None, *, strict: bool
) -> Classic:
    floor = -FLOAT32_MAX if strict else MIN_SCALE
    made = Classic(
        floor if low is None else low,
        FLOAT32_MAX if high is None else high,
        fixed=False,
    )
    made.admit(init)
    made.fixed = low is not None or high is not None
    return made


def _check_bounds(low: float | None, high: float | None) -> None:
    for name, bound in (("min_scale", low), ("max_scale", high)):
        if bound is None:
            continue
        if not (hasattr(bound, "__float__") and SMALLEST <= bound <= FLOAT32_MAX):
            message = (
                f"`{name}` must be a positive number that float32 can hold, and divide "
                f"1 by, got {bound!r}. Leave it out for the default, or give e.g. 1.0."
            )
            raise OptionError(message)
    if low is not None and high is not None and low > high:
        message = f"`min_scale` {low!r} must not exceed `max_scale` {high!r}."
        raise OptionError(message)


def _check_start(init: float, low: float | None, high: float | None) -> None:
    if not (low or 0.0) <= init <= (math.inf if high is None else high):
        message = (
            f"`init_scale` must lie within `min_scale` and `max_scale`, got {init!r} "
            f"outside of {low!r} .. {high!r}. Give an `init_scale` within them."
        )
        raise OptionError(message)


def limit(name: str, value: Any) -> None:
    """Refuse a threshold that would write NaN into every gradient."""
    if isinstance(value, torch.Tensor):
        return  # may lie on a device: nobody asks it
    if not (isinstance(value, (int, float)) and value >= 0):
        message = (
            f"`{name}` must be a number of at least 0, got {value!r}: gradients are "
            "multiplied or cut down to it. Pass `float('inf')` to only measure."
        )
        raise OptionError(message)


def shared_order(order: float) -> None:
    """Refuse a norm that is not made of the norms of parts."""
    if order == 0.0 or math.isnan(order) or order == -math.inf:
        message = (
            f"`norm_type` {order:g} has no meaning for gradients that several ranks "
            "hold in parts. Pass 2, another positive number, or `float('inf')`."
        )
        raise OptionError(message)


def never_syncs(sync: str) -> bool:
    """Read the `sync` option."""
    if sync not in ("auto", "never"):
        message = (
            "`sync` must be 'auto' (ask the device once per step where an optimizer "
            f"needs it) or 'never' (undo skipped steps on the device), got {sync!r}."
        )
        raise OptionError(message)
    return sync == "never"


def heals(on_mismatch: str) -> bool:
    """Read the `on_mismatch` option."""
    if on_mismatch not in ("raise", "heal"):
        message = (
            "`on_mismatch` must be 'raise' (stop when ranks hold different scales) or "
            f"'heal' (skip that step, take the smallest scale), got {on_mismatch!r}."
        )
        raise OptionError(message)
    return on_mismatch == "heal"
