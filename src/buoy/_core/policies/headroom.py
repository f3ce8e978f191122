"""Set the loss scale from the measured size of the gradients.

Classic rules detect a scale that is too high only by losing a step, and never a scale
that is too low.  This rule measures the largest gradient of each step, and keeps it a
margin below the largest number of the format.  What cannot be measured, such as an
overflow in the gradient of an activation, it learns from the overflows.
"""

import math
from dataclasses import dataclass, field

from buoy._core.checks import number, ordered, power_of_two
from buoy._core.ops import Ops, Precision, Scalar, ops_of
from buoy._core.policies.policy import Bounds
from buoy._core.policies.start import bounded
from buoy._core.state import Seen

__all__ = ["Headroom", "HeadroomState"]

# The level.  Sizes are in binades: 1 binade is a factor of two.
FADE = 3 / 64  # by which the peak falls in a step
WIDE = 8.0  # the margin while few gradients are small
NARROW = 4.0  # the margin otherwise
FEW = 2.0**-15  # the largest share of small gradients that counts as few
CLIMB = 12.0  # up while all gradients are zero
BLIND = 32.0  # log2 of a scale that zero gradients do not raise, if they set it
UNKNOWN = -1024.0  # the peak before any measurement

# The ceiling.
DEEP = 9.0  # how far below the level an overflow leads
CRAWL = 2.0  # how far below the scale, if that is as deep or had reached the ceiling
UNDO = 7.0  # how much of the rises before the last one an overflow takes back
SOON = 4.0  # an overflow is soon if the ceiling waited for less
SHORT = 1.0  # the least patience, in steps
LONG = 1024.0  # the most
LONGER = 32.0  # the factor of patience after an overflow that takes back
HURRY = 1 / 64  # the part of a wait that is enough while all gradients are zero
REST = 1 / 128  # the part of patience that is added to the wait after taking back


@dataclass(frozen=True, slots=True)
class HeadroomState:
    """The state of `Headroom`.  Never validated: the fields may be tracers.

    All but the scale are multiples of 1/64, and small: float32 and float64 compute the
    same.
    """

    scale: Scalar  # the multiplier of the next loss, a power of two
    peak: Scalar  # log2 of the largest unscaled gradient, fading
    margin: Scalar  # how far the level keeps it below the largest number
    ceiling: Scalar  # log2 of the highest scale to use
    base: Scalar  # the ceiling that it falls back to
    patience: Scalar  # finite steps that it waits at its base
    waited: Scalar  # finite steps since it moved; starts below 0 for a longer wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom:
    """Keep the largest scaled gradient a margin below the largest number.

    The rule, with sizes and scales in log2:

    1. The peak is the largest unscaled gradient so far; it fades by 3/64 per step that
       is measured.
    2. The level is the scale that keeps the peak 8 below the format's largest number,
       or 4 while more than 2^-15 of the scaled gradients are below 2^-20.
    3. Before a gradient other than 0 was measured, the level is the present scale; it
       is 12 above it if all gradients are zero and the scale is below 2^32.
    4. The next scale is the level, but not above the ceiling, and within the bounds.
    5. An overflow lowers the ceiling to 9 below the level; if the scale is that low
       already, or had reached a ceiling that waited for 4 finite steps, to 2 below the
       scale.
    6. A ceiling that holds the scale below the level rises by 1 after `patience` finite
       steps, again after half as many, and so on, down to 1/64; while patience is 1 and
       the ceiling is more than 10 below the level, it rises half the way to 9 below it.
    7. An overflow at a ceiling that rose takes back the last rise and up to 7 of those
       before instead, makes patience 32 times longer, at most 1024, and the next wait
       longer by 1/128 of it, rounded down; every other overflow makes patience as short
       as the ceiling waited, at least 1.
    8. While all gradients are zero, the ceiling waits for 1/64 of that only, and rises
       by 12; the peak fades only where the level set the scale, below 2^32.
    9. A step whose loss was not finite before it was scaled changes nothing.

    Example:
        >>> policy = Headroom()
        >>> state = policy.update(policy.init(), Seen(finite=True, amax_log2=-3.0))
        >>> state.peak, state.margin, state.scale == 2.0**18
        (-11.0, 8.0, True)
    """

    init_scale: float = 2.0**8
    min_scale: float = 2.0**-24
    max_scale: float = 2.0**64
    max_log2: float = math.log2(65504.0)  # of the format's largest number
    # Derived: log2 of the bounds, and `max_log2` rounded down to what is exact.
    lowest: float = field(init=False, repr=False, compare=False)
    highest: float = field(init=False, repr=False, compare=False)
    top: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        number(self, "init_scale", above=0.0)
        number(self, "min_scale", least=2.0**-100)
        number(self, "max_scale", above=0.0, most=2.0**100)
        ordered(self, "min_scale", "max_scale")
        number(self, "init_scale", least=self.min_scale, most=self.max_scale)
        for name in ("init_scale", "min_scale", "max_scale"):
            power_of_two(self, name)
        number(self, "max_log2", least=1.0, most=128.0)
        object.__setattr__(self, "lowest", math.log2(self.min_scale))
        object.__setattr__(self, "highest", math.log2(self.max_scale))
        object.__setattr__(self, "top", math.floor(self.max_log2 * 64) / 64)

    @property
    def bounds(self) -> Bounds:
        """From `min_scale` to `max_scale`."""
        return Bounds(self.min_scale, self.max_scale)

    @property
    def wants(self) -> frozenset[str]:
        """The size of the gradients, the share of small ones, and the loss's state."""
        return frozenset({"amax_log2", "sparse", "underflow", "loss_finite"})

    @property
    def precision(self) -> Precision:
        """float32, which holds every number of the state exactly."""
        return "float32"

    def init(self, *, scale: Scalar = None) -> HeadroomState:
        """Start at `init_scale` or `scale`, bounded and rounded to a power of two."""
        start = self.init_scale if scale is None else scale
        start = bounded(start, self.min_scale, self.max_scale, "float32")
        ops = ops_of(start)
        k = _exponent(start, ops)
        k = ops.where(ops.exp2(k) > start, k - 1.0, k)
        return HeadroomState(
            scale=ops.exp2(k),
            peak=UNKNOWN,
            margin=WIDE,
            ceiling=self.highest,
            base=self.highest,
            patience=SHORT,
            waited=0.0,
        )

    def foresee(
        self, state: HeadroomState, loss: Scalar, *, ops: Ops | None = None
    ) -> HeadroomState:
        """Return the state unchanged: this rule does not look ahead."""
        del loss, ops
        return state

    def update(
        self, state: HeadroomState, seen: Seen, *, ops: Ops | None = None
    ) -> HeadroomState:
        """Return the next state from the findings of this step."""
        if ops is None:
            ops = ops_of(seen.finite, state.scale)
        where = ops.where
        finite = seen.finite
        k = _exponent(state.scale, ops)
        amax = math.nan if seen.amax_log2 is None else seen.amax_log2
        measured = amax < 256.0  # neither inf nor NaN, which is: not measured
        zero = amax < -256.0

        # The level.
        fades = where(zero, (k < state.ceiling) & (k < BLIND), measured)
        peak = state.peak - where(fades, FADE, 0.0)
        size = where(measured, _sixteenths(amax, ops) - k, peak)
        peak = where(size > peak, size, peak)
        margin = state.margin
        if seen.underflow is not None:  # NaN: not counted in this step
            margin = where(seen.underflow <= FEW, WIDE, margin)
            margin = where(seen.underflow > FEW, NARROW, margin)
        level = ops.floor(self.top - margin - peak)
        blind = where(zero & (k < BLIND), k + CLIMB, k)
        level = where(peak > UNKNOWN, level, blind)
        level = where(level < self.highest, level, self.highest)
        deep = level - DEEP

        # The ceiling after a finite step.
        reached = k >= state.ceiling
        waited = state.waited + 1.0
        wait = state.patience * ops.exp2(state.base - state.ceiling)
        wait = where(zero, wait * HURRY, wait)
        rises = reached & (state.ceiling < level) & (waited >= wait)
        above = state.ceiling + where(zero, CLIMB, 1.0)
        far = (deep > above) & (state.patience <= SHORT)
        above = where(far, ops.floor((deep + above) / 2.0), above)
        raised = where(rises, above, state.ceiling)

        # The ceiling after an overflow.
        rose = reached & (state.base < state.ceiling)
        slow = (reached & (state.waited >= SOON)) | (k <= deep)
        lowered = where(rose, state.base, where(slow, k - CRAWL, deep))
        shorter = where(state.waited < state.patience, state.waited, state.patience)
        patience = where(rose, state.patience * LONGER, shorter)
        patience = where(patience > SHORT, patience, SHORT)
        patience = where(patience < LONG, patience, LONG)

        ceiling = where(finite, raised, lowered)
        base = where(finite, state.base, lowered)
        follows = where(finite & rises, state.ceiling - UNDO, base)
        target = where(level < ceiling, level, ceiling)
        target = where(target > self.lowest, target, self.lowest)
        after = HeadroomState(
            scale=ops.exp2(target),
            peak=peak,
            margin=margin,
            ceiling=ceiling,
            base=where(base > follows, base, follows),
            patience=where(finite, state.patience, patience),
            waited=where(
                finite,
                where(rises, 0.0, waited),
                where(rose, -ops.floor(REST * patience), 0.0),
            ),
        )
        if seen.loss_finite is None:
            return after
        return HeadroomState(
            *(
                where(seen.loss_finite, getattr(after, name), getattr(state, name))
                for name in HeadroomState.__slots__
            )
        )


def _exponent(scale: Scalar, ops: Ops) -> Scalar:
    """Return log2 of a scale, rounded: not every backend's is exact."""
    return ops.floor(ops.log2(scale) + 0.5)


def _sixteenths(log2: Scalar, ops: Ops) -> Scalar:
    """Round to sixteenths: backends differ in the last bits of a logarithm."""
    return ops.floor(ops.cast(log2, "float32") * 16.0 + 0.5) / 16.0
