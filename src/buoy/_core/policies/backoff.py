"""Grow after a quiet while, shrink on overflow: the classic family.

Every scaler that acts on overflow events alone is an instance of `Backoff`, most of
them by their parameters, the odd ones by `Quirks`; `presets` holds the table.
"""

from dataclasses import InitVar, dataclass, field, replace
from math import log2
from typing import Literal

from buoy._core.checks import choice, instance, number, ordered, whole
from buoy._core.errors import PolicyError, ScaleCollapsedError
from buoy._core.formats import FLOAT32_MAX, FLOAT32_TINY
from buoy._core.ops import PLAIN, Ops, Precision, Scalar, know_backends, ops_of, single
from buoy._core.policies.quirks import Quirks
from buoy._core.state import Seen

__all__ = ["Backoff", "BackoffState"]

Refill = Literal["growth", "clean", "change", "clean_or_change"]

_REFILLS = ("growth", "clean", "change", "clean_or_change")
_ULP = 2.0**-23  # from 1 to the next float32
_UNSCALABLE = 2.0**-128  # its reciprocal is inf in float32
_NO_QUIRKS = Quirks()


@dataclass(frozen=True, slots=True)
class BackoffState:
    """What survives a step.  What the policy does not use is None, and stays so."""

    scale: Scalar  # float32 [] (float64 with double arithmetic)
    clean_steps: Scalar  # int32 []: finite steps since the scale last moved
    budget: Scalar = None  # int32 []: overflows still forgiven, plus one
    steps: Scalar = None  # int32 []: steps since the scale last moved
    overflows: Scalar = None  # int32 []: overflows since the scale last fell
    exponent: Scalar = None  # float []: log2 of the scale, where growth is a step
    interval: Scalar = None  # float []: the growth interval, where it moves
    pending: Scalar = None  # float []: the scale after next, where changes lag
    settled: Scalar = None  # bool []: whether there ever was an overflow
    streak: Scalar = None  # int32 []: overflows in a row
    collapsed: Scalar = None  # bool []: the policy gave up at this step


@dataclass(frozen=True, slots=True)
class _Constants:
    """The configuration as the rule multiplies it: rounded once, not at each step."""

    growth: float
    backoff: float
    warm: float
    divisor: float
    low: float
    high: float
    wide: bool  # some factor is no float32: multiply in float64, then round
    share: tuple[int, int]  # the tolerance as a fraction


@dataclass(frozen=True, slots=True)
class _Counted:
    """Which way a step counts, and the running share of overflows."""

    charged: Scalar  # bool []: an overflow beyond the tolerance
    calm: Scalar  # bool []: a step towards growth
    steps: Scalar = None
    overflows: Scalar = None


def _fraction(share: float) -> tuple[int, int]:
    if not share:
        return 0, 1
    from fractions import Fraction  # noqa: PLC0415 - slow to import, seldom needed

    return Fraction(share).limit_denominator(10_000).as_integer_ratio()


def _unless_none(
    ops: Ops, condition: Scalar, if_true: Scalar, if_false: Scalar
) -> Scalar:
    if if_true is None or if_false is None:
        return None
    return ops.where(condition, if_true, if_false)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Shrink on overflow; grow after `growth_interval` finite steps.

    The rule::

        finite:    clean += 1;  if clean == growth_interval: scale *= growth_factor
        overflow:  clean = 0;   scale *= backoff_factor      (the step is skipped)
        both:      min_scale <= scale <= max_scale

    `hysteresis` forgives that many overflows less one; `hysteresis_refill` says what
    restores the budget.  `tolerance` is the share of overflowing steps since the scale
    last moved below which the scale stays.  `growth_step` grows log2(scale) by that
    much instead of multiplying.

    Example:
        >>> policy = Backoff(init_scale_power=4, growth_interval=2)
        >>> state = policy.init()
        >>> for finite in (True, True, False):
        ...     state = policy.update(state, Seen(finite=finite))
        ...     print(state.scale)
        16.0
        32.0
        16.0
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 2.0**-24
    max_scale: float = 2.0**64
    hysteresis: int = 1
    hysteresis_refill: Refill = "growth"
    tolerance: float = 0.0
    growth_step: float | None = None
    quirks: Quirks = _NO_QUIRKS
    constants: _Constants = field(init=False, repr=False, compare=False)
    init_scale_power: InitVar[float | None] = None

    def __post_init__(self, init_scale_power: float | None) -> None:
        if init_scale_power is not None:
            self._raise_to(init_scale_power)
        instance(self, "quirks", Quirks)
        if self.quirks.arithmetic == "double":
            number(self, "init_scale", above=0.0)
            number(self, "growth_factor", above=1.0)
            number(self, "backoff_factor", above=0.0, below=1.0)
        else:  # what float32 would round to 0, 1 or inf is refused
            number(self, "init_scale", least=FLOAT32_TINY, most=FLOAT32_MAX)
            number(self, "growth_factor", least=1.0 + _ULP, most=FLOAT32_MAX)
            number(self, "backoff_factor", least=FLOAT32_TINY, most=1.0 - _ULP / 2)
        whole(self, "growth_interval", least=1)
        number(self, "min_scale", least=FLOAT32_TINY, most=FLOAT32_MAX)
        number(self, "max_scale", least=FLOAT32_TINY, most=FLOAT32_MAX)
        ordered(self, "min_scale", "max_scale")
        whole(self, "hysteresis", least=1)
        choice(self, "hysteresis_refill", _REFILLS)
        number(self, "tolerance", least=0.0, most=1.0)
        number(self, "growth_step", above=0.0, optional=True)
        if self.quirks is _NO_QUIRKS:  # a peer's start may lie outside its bounds
            number(self, "init_scale", least=self.min_scale, most=self.max_scale)
        object.__setattr__(self, "constants", self._rounded())

    def _rounded(self) -> _Constants:
        quirks = self.quirks
        factors = (
            self.growth_factor,
            self.backoff_factor,
            quirks.warm_growth_factor or 1.0,
        )
        wide = quirks.arithmetic == "wide" and any(single(x) != x for x in factors)
        exact = quirks.arithmetic == "double"
        keep = exact or wide
        growth, backoff, warm = factors if keep else map(single, factors)
        low, high, divisor = (
            self.min_scale,
            self.max_scale,
            quirks.backoff_divisor or 1.0,
        )
        if not exact:
            low, high, divisor = single(low), single(high), single(divisor)
        return _Constants(
            growth, backoff, warm, divisor, low, high, wide, _fraction(self.tolerance)
        )

    def _raise_to(self, power: float) -> None:
        if isinstance(power, bool) or not isinstance(power, (int, float)):
            message = f"Backoff: `init_scale_power` must be a number, got {power!r}."
            raise PolicyError(message)
        if self.init_scale not in (2.0**16, PLAIN.exp2(float(power))):
            message = (
                "Backoff: give `init_scale` or `init_scale_power`, not both, "
                f"got {self.init_scale!r} and {power!r}."
            )
            raise PolicyError(message)
        object.__setattr__(self, "init_scale", PLAIN.exp2(float(power)))

    @property
    def wants(self) -> frozenset[str]:
        """Nothing: this family learns from overflows alone."""
        return frozenset()

    @property
    def precision(self) -> Precision:
        """float32, but for the scalers that keep a Python float."""
        wide = self.quirks.arithmetic == "double" or self.growth_step is not None
        return "float64" if wide else "float32"

    def init(self) -> BackoffState:
        """Start at `init_scale`, with nothing counted."""
        know_backends()
        quirks = self.quirks
        scale = PLAIN.cast(self.init_scale, self.precision)
        counts_share = self.tolerance > 0.0
        stops = (
            quirks.stop_scale is not None
            or quirks.stop_at_floor
            or quirks.stop_after > 0
            or quirks.stop_unscalable
        )
        return BackoffState(
            scale=scale,
            clean_steps=-quirks.growth_delay,
            budget=self.hysteresis if self.hysteresis > 1 else None,
            steps=0 if counts_share else None,
            overflows=0 if counts_share else None,
            exponent=None if self.growth_step is None else log2(scale),
            interval=(
                float(self.growth_interval) if quirks.interval_follows_scale else None
            ),
            pending=scale if quirks.lag else None,
            settled=None if quirks.warm_growth_factor is None else False,
            streak=0 if quirks.stop_after else None,
            collapsed=False if stops else None,
        )

    def foresee(
        self, state: BackoffState, loss: Scalar, *, ops: Ops | None = None
    ) -> BackoffState:
        """Look away: this family learns from overflows only."""
        del loss, ops
        return state

    def applies(self, seen: Seen) -> Scalar:
        """Apply finite steps only."""
        return seen.finite

    def update(
        self, state: BackoffState, seen: Seen, *, ops: Ops | None = None
    ) -> BackoffState:
        """Return the next state.  Branch-free on numbers: it traces, and never syncs.

        On plain numbers a policy that gives up raises `ScaleCollapsedError`; on
        arrays it sets `collapsed`, for the front end to find when it next looks.
        """
        if ops is None:
            ops = ops_of(seen.finite, state.scale)
        start = state.scale if state.pending is None else state.pending
        if ops is not PLAIN and self.precision == "float64":
            start = ops.cast(start, "float64")
        counted = self._counted(state, seen.finite, ops)
        shrink, budget = counted.charged, state.budget
        if budget is not None:
            budget = budget - ops.where(shrink & (budget > 0), 1, 0)
            shrink = shrink & (budget <= 0)
        if self.quirks.at_min == "gate":
            shrink = shrink & (start > self.min_scale)
        clean = self._clean(state, counted.calm, shrink, ops)
        grow = self._due(state, clean, start, ops)
        if not self.quirks.overflow_counts:
            grow = grow & counted.calm

        exponent = self._stepped(state.exponent, shrink, grow, ops)
        # Plain numbers may look before they compute: most steps move nothing.
        still = ops is PLAIN and not (shrink or grow or self.quirks.clamp_always)
        down = start if still else self._shrunk(start, ops)
        collapsed = self._collapsed(state, seen.finite, shrink, down, ops)
        scale = start
        if not still:
            scale = self._moved(start, down, shrink, grow, state.settled, ops)
        if exponent is not None:
            scale = ops.exp2(exponent)
        after = BackoffState(
            scale=scale if state.pending is None else start,
            clean_steps=clean if self.quirks.modulo else ops.where(grow, 0, clean),
            budget=self._refilled(budget, seen.finite, shrink, grow, ops),
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

    def _counted(self, state: BackoffState, finite: Scalar, ops: Ops) -> "_Counted":
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
        allowed, counted = steps * numerator, overflows * denominator
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

    def _moved(
        self,
        start: Scalar,
        down: Scalar,
        shrink: Scalar,
        grow: Scalar,
        settled: Scalar,
        ops: Ops,
    ) -> Scalar:
        where, quirks = ops.where, self.quirks
        if quirks.stop_scale is not None:
            down = where(down <= quirks.stop_scale, start, down)
        scale = where(shrink, down, start)
        scale = where(grow, self._grown(scale, settled, ops), scale)
        if quirks.clamp_always:
            low, high = self.constants.low, self.constants.high
            scale = where(scale > high, high, scale)
            scale = where(scale < low, low, scale)
        return scale

    def _shrunk(self, scale: Scalar, ops: Ops) -> Scalar:
        quirks, where = self.quirks, ops.where
        if quirks.backoff_divisor is None:
            down = self._times(scale, self.constants.backoff, ops)
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
            return where(low, self.constants.low, down)
        if quirks.at_min == "keep":
            return where(low, scale, down)
        return down

    def _grown(self, scale: Scalar, settled: Scalar, ops: Ops) -> Scalar:
        up = self._times(scale, self.constants.growth, ops)
        if self.quirks.warm_growth_factor is not None:
            warm = self._times(scale, self.constants.warm, ops)
            up = ops.where(settled, up, warm)
        if self.quirks.at_max == "clamp":
            return ops.where(up > self.max_scale, self.constants.high, up)
        if self.quirks.at_max == "keep":
            return ops.where(up > self.max_scale, scale, up)
        return up

    def _stepped(
        self, exponent: Scalar, shrink: Scalar, grow: Scalar, ops: Ops
    ) -> Scalar:
        if exponent is None:
            return None
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

    def _times(self, scale: Scalar, factor: float, ops: Ops) -> Scalar:
        if self.quirks.arithmetic == "double":
            return scale * factor
        if self.constants.wide:
            scale = ops.cast(scale, "float64")
        return ops.cast(scale * factor, "float32")

    def _over(self, scale: Scalar, ops: Ops) -> Scalar:
        # The select hides the constant from XLA, which would multiply by 1/divisor.
        divisor = self.constants.divisor
        if self.quirks.arithmetic == "double":
            return scale / ops.where(scale >= 0.0, ops.cast(divisor, "float64"), 1.0)
        return ops.cast(scale / ops.where(scale >= 0.0, divisor, 1.0), "float32")

    def _refilled(
        self, budget: Scalar, finite: Scalar, shrink: Scalar, grow: Scalar, ops: Ops
    ) -> Scalar:
        if budget is None:
            return None
        refill = grow
        if self.hysteresis_refill in ("clean", "clean_or_change"):
            refill = refill | finite
        if self.hysteresis_refill in ("change", "clean_or_change"):
            refill = refill | shrink
        return ops.where(refill, self.hysteresis, budget)

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
        counted: "_Counted",
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
        self, counted: "_Counted", shrink: Scalar, grow: Scalar, ops: Ops
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
            f"The loss scale is {state.scale!r} and this policy gives up rather than "
            "lower it again. The loss is probably NaN or inf before it is scaled, or "
            "the weights already are: look at the unscaled loss, lower the learning "
            "rate, or use a policy that holds at its floor, e.g. 'headroom'."
        )
        return ScaleCollapsedError(message, state)
