"""Checks of the configuration of `Backoff` and of the presets made like it."""

from typing import Any

from buoy._core.checks import choice, number, ordered, whole
from buoy._core.errors import PolicyError
from buoy._core.formats import FLOAT32_MAX, FLOAT32_TINY
from buoy._core.ops import PLAIN

__all__ = ["check_bounds_and_counts", "check_factors", "scale_of_power"]

_REFILLS = ("growth", "clean", "change", "clean_or_change")
_ULP = 2.0**-23  # from 1 to the next float32
_DEFAULT = 2.0**16


def scale_of_power(power: Any, init_scale: float) -> float:
    """Return 2^`init_scale_power`; raise if `init_scale` was given as well."""
    if isinstance(power, bool) or not isinstance(power, (int, float)):
        message = f"Backoff: `init_scale_power` must be a number, got {power!r}."
        raise PolicyError(message)
    scale: float = PLAIN.exp2(float(power))
    if init_scale not in (_DEFAULT, scale):
        message = (
            "Backoff: give `init_scale` or `init_scale_power`, not both, "
            f"got {init_scale!r} and {power!r}."
        )
        raise PolicyError(message)
    return scale


def check_factors(policy: Any) -> None:
    """Raise for factors that float32 would round to 0, 1 or inf."""
    number(policy, "init_scale", least=FLOAT32_TINY, most=FLOAT32_MAX)
    number(policy, "growth_factor", least=1.0 + _ULP, most=FLOAT32_MAX)
    number(policy, "backoff_factor", least=FLOAT32_TINY, most=1.0 - _ULP / 2)


def check_bounds_and_counts(policy: Any) -> None:
    """Raise for bounds and counts that the rule cannot use."""
    whole(policy, "growth_interval", least=1)
    number(policy, "min_scale", least=FLOAT32_TINY, most=FLOAT32_MAX)
    number(policy, "max_scale", least=FLOAT32_TINY, most=FLOAT32_MAX)
    ordered(policy, "min_scale", "max_scale")
    whole(policy, "hysteresis", least=1)
    choice(policy, "hysteresis_refill", _REFILLS)
    number(policy, "tolerance", least=0.0, most=1.0)
