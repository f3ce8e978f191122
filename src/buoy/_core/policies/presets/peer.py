"""`Backoff` with the differences of existing scalers, the peers.

The parameters that peers share are those of `Backoff`; each difference is a field of
`Quirks`.  Presets use this class; new code should use `Backoff`.
"""

from dataclasses import dataclass, field, replace
from math import log2
from typing import NamedTuple

from buoy._core.checks import instance, number
from buoy._core.errors import ScaleCollapsedError
from buoy._core.formats import FLOAT32_MAX, FLOAT32_TINY
from buoy._core.ops import PLAIN, Ops, Precision, Scalar, ops_of, single
from buoy._core.policies.backoff import (
    Backoff,
    BackoffState,
    Constants,
    check_bounds_and_counts,
    check_factors,
    fraction,
    refills,
    scale_of_power,
)
from buoy._core.policies.policy import MIN_SCALE, Bounds
from buoy._core.policies.presets.quirks import Quirks
from buoy._core.policies.start import bounded, exponent_of
from buoy._core.state import Seen

__all__ = ["PeerBackoff"]

_NO_QUIRKS = Quirks()
_UNSCALABLE = 2.0**-128  # its reciprocal is inf in float32
_DOUBLE = (5e-324, float.fromhex("0x1.fffffffffffffp+1023"))  # positive and finite


class _Counted(NamedTuple):
    """How a step counts, and the running share of overflows."""

    charged: Scalar  # bool []: an overflow beyond the tolerance
    calm: Scalar  # bool []: a step towards growth
    steps: Scalar = None
    overflows: Scalar = None


def _unless_none(
    ops: Ops, condition: Scalar, if_true: Scalar, if_false: Scalar
) -> Scalar:
    if if_true is None or if_false is None:
        return None
    return ops.where(condition, if_true, if_false)


@dataclass(frozen=True, slots=True)
class _Moves(Constants):
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
        where = ops.where
        quirks = self.quirks
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
        quirks = self.quirks
        where = ops.where
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerBackoff(Backoff):
    """The rule of an existing scaler, bit for bit.

    `growth_step` is added to log2 of the scale at growth, instead of multiplying the
    scale.  Unlike that of `Backoff`, the start may lie outside the bounds.

    Example:
        >>> late = PeerBackoff(growth_interval=1, quirks=Quirks(growth_delay=1))
        >>> state = late.update(late.init(), Seen(finite=True))
        >>> state.scale, late.update(state, Seen(finite=True)).scale
        (65536.0, 131072.0)
    """

    growth_step: float | None = None
    quirks: Quirks = _NO_QUIRKS
    constants: _Moves = field(init=False, repr=False, compare=False)

    def __post_init__(self, init_scale_power: float | None) -> None:
        if init_scale_power is not None:
            start = scale_of_power(init_scale_power, self.init_scale)
            object.__setattr__(self, "init_scale", start)
        instance(self, "quirks", Quirks)
        if self.quirks.arithmetic == "double":
            number(self, "init_scale", above=0.0)
            number(self, "growth_factor", above=1.0)
            number(self, "backoff_factor", above=0.0, below=1.0)
        else:
            check_factors(self)
        check_bounds_and_counts(self)
        number(self, "growth_step", above=0.0, optional=True)
        object.__setattr__(self, "constants", _moves(self, self.quirks))

    @property
    def bounds(self) -> Bounds:
        """Wider than the peer's own: it may start, or be, outside of those."""
        low = MIN_SCALE
        if self.quirks.at_min != "none":
            low = min(self.min_scale, MIN_SCALE)
        return Bounds(low, peer=True)

    @property
    def precision(self) -> Precision:
        """float32, but for the scalers that keep a Python float."""
        wide = self.quirks.arithmetic == "double" or self.growth_step is not None
        return "float64" if wide else "float32"

    def init(self, *, scale: Scalar = None) -> BackoffState:
        """Start at `init_scale` or at `scale`, as peers do, even outside the bounds."""
        quirks = self.quirks
        tolerant = self.tolerance > 0.0
        double = quirks.arithmetic == "double"
        limits = _DOUBLE if double else (FLOAT32_TINY, FLOAT32_MAX)
        start = self.init_scale if scale is None else scale
        start = bounded(start, *limits, self.precision)
        stops = (
            quirks.stop_scale is not None
            or quirks.stop_at_floor
            or quirks.stop_after > 0
            or quirks.stop_unscalable
        )
        return BackoffState(
            scale=start,
            clean_steps=-quirks.growth_delay,
            budget=self.hysteresis if self.hysteresis > 1 else None,
            steps=0 if tolerant else None,
            overflows=0 if tolerant else None,
            exponent=None if self.growth_step is None else exponent_of(start),
            interval=(
                float(self.growth_interval) if quirks.interval_follows_scale else None
            ),
            pending=start if quirks.lag else None,
            settled=None if quirks.warm_growth_factor is None else False,
            streak=0 if quirks.stop_after else None,
            collapsed=False if stops else None,
        )

    def update(
        self, state: BackoffState, seen: Seen, *, ops: Ops | None = None
    ) -> BackoffState:
        """Return the next state.  Traceable: no branch on numbers, no host read.

        On plain numbers a policy that gives up raises `ScaleCollapsedError`; on
        arrays it sets `collapsed`, for the front end to read.
        """
        if ops is None:
            ops = ops_of(seen.finite, state.scale)
        start = state.scale if state.pending is None else state.pending
        if ops is not PLAIN and self.precision == "float64":
            start = ops.cast(start, "float64")
        counted = self._counted(state, seen.finite, ops)
        shrink = counted.charged
        budget = state.budget
        if budget is not None:
            budget = budget - ops.where(shrink & (budget > 0), 1, 0)
            shrink = shrink & (budget <= 0)
        if self.quirks.at_min == "gate":
            shrink = shrink & (start > self.min_scale)
        clean = self._clean(state, counted.calm, shrink, ops)
        grow = self._due(state, clean, start, ops)
        if not self.quirks.overflow_counts:
            grow = grow & counted.calm

        # Plain numbers may branch: most steps do not move the scale.
        still = ops is PLAIN and not (shrink or grow or self.quirks.clamp_always)
        down = start if still else self.constants.shrunk(start, ops)
        collapsed = self._collapsed(state, seen.finite, shrink, down, ops)
        scale = start
        exponent = state.exponent
        if exponent is not None:
            exponent = self._stepped(exponent, shrink, grow, ops)
            scale = ops.exp2(exponent)
        elif not still:
            scale = self.constants.moved(start, down, shrink, grow, state.settled, ops)
        if budget is not None:
            refill = refills(self.hysteresis_refill, seen.finite, shrink, grow)
            budget = ops.where(refill, self.hysteresis, budget)
        after = BackoffState(
            scale=scale if state.pending is None else start,
            clean_steps=clean if self.quirks.modulo else ops.where(grow, 0, clean),
            budget=budget,
            steps=self._since(counted, seen.finite, shrink, grow, ops),
            overflows=self._cleared(counted, shrink, grow, ops),
            exponent=exponent,
            interval=self._interval(state.interval, shrink, grow, ops),
            pending=None if state.pending is None else scale,
            settled=_unless_none(ops, seen.finite, state.settled, True),
            streak=self._streak(state.streak, seen.finite, ops),
            collapsed=collapsed,
        )
        return after if collapsed is None else self._given_up(after, ops)

    def _counted(self, state: BackoffState, finite: Scalar, ops: Ops) -> _Counted:
        charged = ops.where(finite, False, True)
        if state.steps is None:
            return _Counted(charged=charged, calm=finite)
        steps = state.steps + 1
        overflows = state.overflows + ops.where(finite, 0, 1)
        charged = charged & self._share_exceeded(steps, overflows)
        calm = finite
        if self.quirks.tolerated_counts:
            calm = ops.where(charged, False, True)
        return _Counted(charged=charged, calm=calm, steps=steps, overflows=overflows)

    def _share_exceeded(self, steps: Scalar, overflows: Scalar) -> Scalar:
        # Whole numbers, not a quotient: exact on every backend, and equal to comparing
        # the rounded quotient as the peers do.
        numerator, denominator = self.constants.share
        allowed = steps * numerator
        counted = overflows * denominator
        return counted > allowed if self.quirks.tolerated_counts else counted >= allowed

    def _clean(
        self, state: BackoffState, calm: Scalar, shrink: Scalar, ops: Ops
    ) -> Scalar:
        quirks = self.quirks
        restart: Scalar = 1 if quirks.overflow_counts else -quirks.growth_delay
        if quirks.keep_count:
            restart = state.clean_steps
        elif quirks.at_min == "gate":
            restart = ops.where(shrink, restart, state.clean_steps)
        return ops.where(calm, state.clean_steps + 1, restart)

    def _due(
        self, state: BackoffState, clean: Scalar, start: Scalar, ops: Ops
    ) -> Scalar:
        interval = self.growth_interval if state.interval is None else state.interval
        due = (clean % interval == 0) if self.quirks.modulo else (clean >= interval)
        if state.settled is not None:
            due = ops.where(state.settled, due, True)
        return due & (start < self.max_scale) if self.quirks.at_max == "gate" else due

    def _stepped(
        self, exponent: Scalar, shrink: Scalar, grow: Scalar, ops: Ops
    ) -> Scalar:
        where = ops.where
        exponent = where(shrink, exponent + log2(self.backoff_factor), exponent)
        exponent = where(grow, exponent + self.growth_step, exponent)
        if self.quirks.at_max == "clamp":
            high = log2(self.max_scale)
            exponent = where(exponent > high, high, exponent)
        if self.quirks.at_min == "clamp":
            low = log2(self.min_scale)
            exponent = where(exponent < low, low, exponent)
        return exponent

    def _interval(
        self, interval: Scalar, shrink: Scalar, grow: Scalar, ops: Ops
    ) -> Scalar:
        if interval is None:
            return None
        shorter = ops.floor(interval / self.growth_factor)
        shorter = ops.where(shorter < 1.0, 1.0, shorter)
        longer = interval * self.growth_factor
        return ops.where(shrink, shorter, ops.where(grow, longer, interval))

    def _since(
        self,
        counted: _Counted,
        finite: Scalar,
        shrink: Scalar,
        grow: Scalar,
        ops: Ops,
    ) -> Scalar:
        if counted.steps is None:
            return None
        steps = ops.where(shrink, 0, counted.steps)
        if self.quirks.overflow_counts:
            steps = steps + ops.where(finite, 0, 1)
        return ops.where(grow, 0, steps)

    def _cleared(
        self, counted: _Counted, shrink: Scalar, grow: Scalar, ops: Ops
    ) -> Scalar:
        if counted.overflows is None:
            return None
        clears = shrink | grow if self.quirks.tolerated_counts else shrink
        return ops.where(clears, 0, counted.overflows)

    def _streak(self, streak: Scalar, finite: Scalar, ops: Ops) -> Scalar:
        return None if streak is None else ops.where(finite, 0, streak + 1)

    def _collapsed(
        self,
        state: BackoffState,
        finite: Scalar,
        shrink: Scalar,
        down: Scalar,
        ops: Ops,
    ) -> Scalar:
        quirks = self.quirks
        if quirks.stop_scale is not None:
            return shrink & (down <= quirks.stop_scale)
        if quirks.stop_at_floor:
            return shrink & (state.scale == self.min_scale)
        if quirks.stop_after:
            return ops.where(finite, False, state.streak >= quirks.stop_after)
        if quirks.stop_unscalable:
            return finite & (state.scale <= _UNSCALABLE)
        return None

    def _given_up(self, state: BackoffState, ops: Ops) -> BackoffState:
        if ops is PLAIN and not state.collapsed:
            return state
        if self.quirks.stop_scale is not None:
            # fairseq raises before it has counted the step.
            clean = ops.where(state.collapsed, -1, state.clean_steps)
            steps = _unless_none(ops, state.collapsed, -1, state.steps)
            state = replace(state, clean_steps=clean, steps=steps)
        if ops is PLAIN:
            raise self._collapse(state)
        return state

    def _collapse(self, state: BackoffState) -> ScaleCollapsedError:
        message = (
            f"The loss scale is {state.scale!r}, and this policy stops instead of "
            "lowering it further. The loss is probably NaN or inf before it is scaled, "
            "or the weights already are: check the unscaled loss, lower the learning "
            "rate, or use a policy that stays at its minimum, e.g. 'headroom'."
        )
        return ScaleCollapsedError(message, state)


def _moves(policy: Backoff, quirks: Quirks) -> _Moves:
    """Return the configuration, rounded to the precision of the peer."""
    warm = quirks.warm_growth_factor or 1.0
    factors = (policy.growth_factor, policy.backoff_factor, warm)
    bounds = (policy.min_scale, policy.max_scale, quirks.backoff_divisor or 1.0)
    double = quirks.arithmetic == "double"
    wide = quirks.arithmetic == "wide" and any(single(x) != x for x in factors)
    growth, backoff, warm = factors if double or wide else map(single, factors)
    low, high, divisor = bounds if double else map(single, bounds)
    return _Moves(
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
