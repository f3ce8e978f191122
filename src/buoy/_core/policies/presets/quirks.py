"""The differences of existing scalers from `Backoff`.

They are not recommended: the presets need them to reproduce their peers exactly.
"""

from dataclasses import dataclass
from typing import Literal

from buoy._core.checks import boolean, choice, number, whole

__all__ = ["Arithmetic", "Bound", "Quirks"]

Arithmetic = Literal["single", "wide", "double"]
Bound = Literal["clamp", "keep", "gate", "none"]

_BOUNDS = ("clamp", "keep", "gate", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quirks:
    """The differences between peers, one field each.

    Example:
        >>> Quirks(arithmetic="double").growth_delay
        0
    """

    # How the scale is multiplied: in float32 by a float32 factor; in float64, then
    # rounded to float32 (torch's kernel); or in float64 throughout (Python scalers).
    arithmetic: Arithmetic = "single"
    backoff_divisor: float | None = None  # divide by this, for its other last bit
    flush_subnormals: bool = False  # XLA on a CPU

    # At a bound: stop there; refuse the move that would cross it; refuse every move
    # once there or beyond (so the last one may cross); or have no bound.
    at_min: Bound = "clamp"
    at_max: Bound = "clamp"
    threshold: float | None = None  # a floor of its own, before all of these
    clamp_always: bool = False  # also where the scale did not move
    floor_resolution: float = 0.0  # smaller moves escape the floor

    # When a clean step counts.
    growth_delay: int = 0  # extra clean steps after the start and after an overflow
    overflow_counts: bool = False  # the overflowing step counts as the first clean one
    keep_count: bool = False  # an overflow does not restart the count
    modulo: bool = False  # the count runs on after growth; every multiple grows
    interval_follows_scale: bool = False
    warm_growth_factor: float | None = None  # on every step until the first overflow

    # What an overflow within the tolerance does, and what clears the share.
    tolerated_counts: bool = False  # it counts as clean; only a share above shrinks

    lag: bool = False  # a change takes effect one step late
    stop_scale: float | None = None  # give up rather than fall to this
    stop_at_floor: bool = False  # give up rather than stay at `min_scale`
    stop_after: int = 0  # give up after so many overflows in a row and one more
    stop_unscalable: bool = False  # give up on a clean step where 1/scale is inf

    def __post_init__(self) -> None:
        choice(self, "arithmetic", ("single", "wide", "double"))
        choice(self, "at_min", _BOUNDS)
        choice(self, "at_max", _BOUNDS)
        for field in ("backoff_divisor", "warm_growth_factor"):
            number(self, field, above=1.0, optional=True)
        number(self, "stop_scale", above=0.0, optional=True)
        number(self, "threshold", above=0.0, optional=True)
        number(self, "floor_resolution", least=0.0)
        whole(self, "growth_delay", least=0)
        whole(self, "stop_after", least=0)
        for field in _SWITCHES:
            boolean(self, field)


_SWITCHES = (
    "flush_subnormals",
    "clamp_always",
    "overflow_counts",
    "keep_count",
    "modulo",
    "interval_follows_scale",
    "tolerated_counts",
    "lag",
    "stop_at_floor",
    "stop_unscalable",
)
