"""How the scale of a peer moves: its arithmetic, and what it does at a bound."""

from dataclasses import dataclass

from buoy._core.formats import FLOAT32_TINY
from buoy._core.ops import Ops, Scalar, single
from buoy._core.policies.backoff import Backoff, Constants, fraction
from buoy._core.policies.presets.quirks import Quirks

__all__ = ["Moves", "moves"]


@dataclass(frozen=True, slots=True)
class Moves(Constants):
    """The two moves of a scale, with the configuration rounded once."""

    warm: float
    divisor: float
    wide: bool  # some factor is no float32: multiply in float64, then round
    min_scale: float  # the bounds as they were given
    max_scale: float
    quirks: Quirks

    def moved(
        self,
        start: Scalar,
        down: Scalar,
        shrink: Scalar,
        grow: Scalar,
        settled: Scalar,
        ops: Ops,
    ) -> Scalar:
        """Return the scale after the move that is due, from `start` or to `down`."""
        where, quirks = ops.where, self.quirks
        if quirks.stop_scale is not None:
            down = where(down <= quirks.stop_scale, start, down)
        scale = where(shrink, down, start)
        scale = where(grow, self._grown(scale, settled, ops), scale)
        if quirks.clamp_always:
            scale = where(scale > self.high, self.high, scale)
            scale = where(scale < self.low, self.low, scale)
        return scale

    def shrunk(self, scale: Scalar, ops: Ops) -> Scalar:
        """Return the scale after an overflow."""
        quirks, where = self.quirks, ops.where
        if quirks.backoff_divisor is None:
            down = self._times(scale, self.backoff, ops)
        else:
            down = self._over(scale, ops)
        if quirks.flush_subnormals:
            down = where(down < FLOAT32_TINY, 0.0, down)
        if quirks.threshold is not None:
            down = where(down < quirks.threshold, quirks.threshold, down)
        low = down < self.min_scale
        if quirks.floor_resolution:
            low = low & (scale - down > quirks.floor_resolution)
        if quirks.at_min == "clamp":
            return where(low, self.low, down)
        if quirks.at_min == "keep":
            return where(low, scale, down)
        return down

    def _grown(self, scale: Scalar, settled: Scalar, ops: Ops) -> Scalar:
        up = self._times(scale, self.growth, ops)
        if self.quirks.warm_growth_factor is not None:
            warm = self._times(scale, self.warm, ops)
            up = ops.where(settled, up, warm)
        if self.quirks.at_max == "clamp":
            return ops.where(up > self.max_scale, self.high, up)
        if self.quirks.at_max == "keep":
            return ops.where(up > self.max_scale, scale, up)
        return up

    def _times(self, scale: Scalar, factor: float, ops: Ops) -> Scalar:
        if self.quirks.arithmetic == "double":
            return scale * factor
        if self.wide:
            scale = ops.cast(scale, "float64")
        return ops.cast(scale * factor, "float32")

    def _over(self, scale: Scalar, ops: Ops) -> Scalar:
        # The select hides the constant from XLA, which would multiply by 1/divisor.
        divisor = self.divisor
        if self.quirks.arithmetic == "double":
            return scale / ops.where(scale >= 0.0, ops.cast(divisor, "float64"), 1.0)
        return ops.cast(scale / ops.where(scale >= 0.0, divisor, 1.0), "float32")


def moves(policy: Backoff, quirks: Quirks) -> Moves:
    """Return the configuration, rounded to the precision of the peer."""
    warm = quirks.warm_growth_factor or 1.0
    factors = (policy.growth_factor, policy.backoff_factor, warm)
    bounds = (policy.min_scale, policy.max_scale, quirks.backoff_divisor or 1.0)
    double = quirks.arithmetic == "double"
    wide = quirks.arithmetic == "wide" and any(single(x) != x for x in factors)
    growth, backoff, warm = factors if double or wide else map(single, factors)
    low, high, divisor = bounds if double else map(single, bounds)
    return Moves(
        growth=growth,
        backoff=backoff,
        low=low,
        high=high,
        share=fraction(policy.tolerance),
        warm=warm,
        divisor=divisor,
        wide=wide,
        min_scale=policy.min_scale,
        max_scale=policy.max_scale,
        quirks=quirks,
    )
