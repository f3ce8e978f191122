"""Set the loss scale from the measured size of the gradients and of the loss.

Classic rules detect a scale that is too high only by losing a step, and never a
scale that is too low. This rule measures the largest gradient of the previous
steps, the share of gradients near the bottom of the format, and the loss of the
current step before it is scaled. It runs unchanged on floats, NumPy scalars,
torch tensors and JAX tracers.
It does not reject outlier batches; the spike guard does.
"""

import math
from dataclasses import dataclass, field, replace

from buoy._core.checks import number, ordered, power_of_two
from buoy._core.ops import Ops, Precision, Scalar, ops_of
from buoy._core.policies.headroom_ceiling import (
    FORGET,
    LEAST,
    RETREAT,
    UNIT,
    UNSET,
    Ceiling,
    Found,
    moved,
    retreat,
)
from buoy._core.policies.headroom_size import size_of
from buoy._core.policies.policy import finite_only
from buoy._core.policies.start import bounded
from buoy._core.state import Seen

__all__ = ["Headroom", "HeadroomState"]

SAFETY = 0.75 * UNIT  # margin beyond the largest remembered spike, plus half its
SPREAD = 2.0 * UNIT  # height, up to this: a later spike may be larger
BEYOND = 2.0 * UNIT  # assumed distance of an overflow beyond the limit
FULL = UNIT  # a margin this close to the widest learns nothing from an overflow
CHEAPEST = 2.0 * UNIT  # margin that is kept even if gradients underflow
FADE = UNIT / 64  # decrease of the level per step of zero gradients
BLIND = 32.0  # log2 of the highest scale that zero gradients may lead to

CUT = 3.0 * UNIT  # most that one count of small gradients takes off the margin

# Trust in the loss.
ALARM = 3.0 * UNIT  # a jump of the loss that the gradients must confirm by half
DOUBTS = 4.0  # false alarms without a true one, after which the loss is ignored


@dataclass(frozen=True, slots=True)
class _Constants:
    """The configuration in whole units, derived once and not at each step."""

    lowest: float
    highest: float
    limit: float
    widest: float
    freest: float
    free_log2: float
    cost_log2: float


@dataclass(frozen=True, slots=True)
class HeadroomState:
    """The state of `Headroom`. Never validated: the fields may be tracers."""

    scale: Scalar  # the multiplier of the next backward pass, 2^whole
    planned: Scalar  # log2 of the scale before this step's loss was seen
    envelope: Scalar  # level of log2 of the largest unscaled gradient
    last: Scalar  # the same of the last step alone
    loss_envelope: Scalar  # level of log2 |loss|
    last_loss: Scalar  # log2 |loss| of the step `last` comes from
    loss: Scalar  # log2 |loss| of this step, UNSET before `foresee`
    margin: Scalar  # learned: how far single steps exceed the envelope
    free: Scalar  # margin that costs no underflow
    overflows: Scalar  # in a row
    doubts: Scalar  # false alarms of the loss since the last true one
    ceiling: Scalar  # log2 of the highest scale to use
    patience: Scalar  # finite steps at the ceiling after which it rises
    waited: Scalar  # finite steps at the ceiling so far
    hold: Scalar  # patience of a ceiling that a level of the gradients explains
    mark: Scalar  # log2 of the gradient that explained an overflow last
    since: Scalar  # finite steps since the last overflow
    spread: Scalar  # how far the largest gradient is below the norm, UNSET if unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom:
    """Keep the largest scaled gradient a learned margin below the maximum.

    All in log2; a = largest unscaled gradient, l = abs(loss), k = scale used.  Where
    gradients are clipped, a is measured in every 5th step and inferred from the norm
    in the others: norm - a changes slowly::

        before backward:
            k = planned - floor(l - L)   if the loss is 1 above its level L
        finite step:
            L = max(min(l, last l), L released towards l)
            a, last a: less what l, last l exceed L by (the loss shows it)
            E = max(min(a, last a), E released towards a)
            margin = max(margin - a little, spike + 0.75 + min(spike / 2, 2))
                with spike = last a - max(a, E)
            underflow measured: free margin up while nothing is lost, else down;
                learned margin down to 2 where it costs more than `cost_share`
            planned = floor(max_log2 - max(E + max(margin, free), a + 0.75)),
                at most the ceiling
        overflow:
            planned = k - 8; counts as a = max_log2 - k + 2: a spike, or with the next
            step a new level; the ceiling falls and rises as below
        all gradients zero:
            planned = k + 8 before the first measurement, else E released;
            not above 2^32, not above the ceiling

    Two steps in a row move a level, a single step only the margin: a spike does not
    lower the scale for long, and a lasting jump is followed at once.

    The ceiling is for what the weights' gradients do not show: an overflow in an
    activation gradient, or tasks that alternate.  It is free at first: above every
    scale, and after an overflow 8 lower than it (16, 32, 64 in a row) and up by 1 per
    step.  These overflows make it hold:

    - a second one within 40 steps, or within 512 if the margin is at its widest or the
      ceiling has held for 2048: 2 below the scale used;
    - one that a new level of a explains: where this level leads, but at least 1 below
      the scale used.

    It holds for 4 steps at first, 32 times longer if the same happens again within 512
    steps or at the ceiling, at most 2048; then it rises by 1, and 4 times faster for
    each further 1.  A single overflow at a ceiling that holds lowers it by 1 only, as
    it may be a bad batch; a second one within 16 steps lowers it by 4.

    A loss that jumps by 3 or more while a rises by less than half of it is a false
    alarm.  After 4 of them the loss is ignored, until an alarm proves true.

    Example:
        >>> policy = Headroom()
        >>> state = policy.foresee(policy.init(), 0.7)
        >>> state.scale
        256.0
    """

    init_scale: float = 2.0**8
    min_scale: float = 2.0**-24
    max_scale: float = 2.0**64
    max_log2: float = math.log2(65504.0)  # of the format's largest number
    max_margin: float = 11.0  # bits, learned from spikes and overflows
    free_margin: float = 8.0  # bits, while nothing underflows
    free_share: float = 1e-6  # of gradients lost, counted as none
    cost_share: float = 1e-5  # of gradients lost, too many for a margin
    release_steps: float = 32.0  # for a level to close a gap by 1/e
    constants: _Constants = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        number(self, "init_scale", above=0.0)
        number(self, "min_scale", least=2.0**-100)
        number(self, "max_scale", above=0.0, most=2.0**100)
        ordered(self, "min_scale", "max_scale")
        number(self, "init_scale", least=self.min_scale, most=self.max_scale)
        for name in ("init_scale", "min_scale", "max_scale", "release_steps"):
            power_of_two(self, name)
        number(self, "max_log2", least=1.0, most=128.0)
        number(self, "max_margin", least=2.0, most=64.0)
        number(self, "free_margin", least=0.0, most=64.0)
        number(self, "free_share", above=0.0, most=1.0)
        number(self, "cost_share", above=0.0, most=1.0)
        number(self, "release_steps", least=1.0, most=2.0**20)
        object.__setattr__(self, "constants", self._derived())

    def _derived(self) -> _Constants:
        def units(x: float) -> float:
            return float(math.floor(x * UNIT))

        return _Constants(
            lowest=math.log2(self.min_scale),
            highest=math.log2(self.max_scale),
            limit=units(self.max_log2),
            widest=units(self.max_margin),
            freest=units(self.free_margin),
            # Measured is the share below 2^-20; about a 32nd of it underflows.
            free_log2=units(math.log2(32 * self.free_share)),
            cost_log2=units(math.log2(32 * self.cost_share)),
        )

    @property
    def wants(self) -> frozenset[str]:
        """The size of the gradients, how many are small, and the loss."""
        return frozenset({"amax_log2", "norm_log2", "underflow", "loss"})

    @property
    def precision(self) -> Precision:
        """float32, because every number is a whole one, below 2^24."""
        return "float32"

    def init(self, *, scale: Scalar = None) -> HeadroomState:
        """Start at `init_scale` or `scale`, bounded and rounded to a power of two."""
        start = self.init_scale if scale is None else scale
        start = bounded(start, self.min_scale, self.max_scale, "float32")
        ops = ops_of(start)
        planned = ops.floor(ops.log2(start) + 0.5)  # the nearest; not above the scale:
        planned = ops.where(ops.exp2(planned) > start, planned - 1.0, planned)
        return HeadroomState(
            scale=ops.exp2(planned),
            planned=planned,
            envelope=UNSET,
            last=UNSET,
            loss_envelope=UNSET,
            last_loss=UNSET,
            loss=UNSET,
            margin=2 * UNIT,
            free=0.0,
            overflows=0.0,
            doubts=0.0,
            ceiling=self.constants.highest + 1.0,
            patience=1.0,
            waited=0.0,
            hold=LEAST,
            mark=UNSET,
            since=FORGET,
            spread=UNSET,
        )

    applies = finite_only

    def foresee(
        self, state: HeadroomState, loss: Scalar, *, ops: Ops | None = None
    ) -> HeadroomState:
        """Lower the scale for this step by the excess of its loss over its level."""
        if ops is None:
            ops = ops_of(loss, state.scale)
        where, lowest = ops.where, self.constants.lowest
        size, usable = _log2(where(loss < 0, -loss, loss), ops)
        size = where(usable, size, UNSET)
        size = where(size > state.loss, size, state.loss)  # if called again
        jump = ops.floor((size - state.loss_envelope) / UNIT)
        trusted = (state.loss_envelope > UNSET) & (state.doubts < DOUBTS)
        jump = where(trusted & (jump > 0), jump, 0.0)
        k = state.planned - jump
        k = where(k < lowest, lowest, k)
        return replace(state, scale=ops.exp2(k), loss=size)

    def update(
        self, state: HeadroomState, seen: Seen, *, ops: Ops | None = None
    ) -> HeadroomState:
        """Return the next state from the findings of this step."""
        if ops is None:
            ops = ops_of(seen.finite, state.scale)
        where, finite = ops.where, seen.finite
        limit, widest = self.constants.limit, self.constants.widest
        used = ops.floor(ops.log2(state.scale) + 0.5)
        overflows = where(finite, 0.0, state.overflows + 1.0)
        size, measured, zero, spread = size_of(seen, used, state.spread, ops)
        # Only the first overflow in a row counts: others may be NaN of the forward.
        known = state.envelope > UNSET
        first = known & (overflows == 1.0)
        news, last, loss_level, level = self._levels(state, size, ops)
        # An overflow at a ceiling that holds does not teach the margin.
        failed, held = state.overflows > 0.0, state.patience > 1.0
        last, free = where(failed & held, level, last), state.free
        margin = self._learn(state.margin, news, last, level, ops)
        if seen.underflow is not None:
            spare = limit - used * UNIT - level
            margin, free = self._price(margin, free, spare, seen.underflow, ops)
            free = where(measured, free, state.free)
        margin = where(measured, margin, state.margin)
        margin = where(margin < widest, margin, widest)
        faint = zero & (state.planned < BLIND)
        level = where(measured, level, state.envelope - where(faint, FADE, 0.0))
        top = level + where(margin > free, margin, free)
        top = where(measured & (news + SAFETY > top), news + SAFETY, top)
        k = ops.floor((limit - top) / UNIT)
        blind = where(used < BLIND - RETREAT, used + RETREAT, BLIND)
        k = where(known | measured, k, where(used < BLIND, blind, used))
        explained = measured & known & failed
        explained = explained & (size > state.envelope + UNIT)
        cause = where(explained, size, UNSET)
        ceiling = Ceiling(*(getattr(state, name) for name in Ceiling._fields))
        bounds = self.constants.lowest, self.constants.highest
        full = state.margin > widest - FULL
        # The scale of the last overflow: from what a first one counted as, or from the
        # retreat since.
        once = ops.floor((limit + BEYOND - state.last) / UNIT)
        again = state.planned + retreat(state.overflows, ops)
        failing = where(state.overflows > 1.0, again, once)
        step = Found(used, k, finite, overflows, cause, full, failing)
        k, ceiling = moved(ceiling, step, bounds, ops)
        beyond = where(first, limit - used * UNIT + BEYOND, state.last)
        doubts = self._doubt(state, size, measured, first, ops)
        return HeadroomState(
            ops.exp2(k),
            k,
            level,
            where(measured, size, beyond),
            where(measured, loss_level, state.loss_envelope),
            where(measured | first, state.loss, state.last_loss),
            state.loss * 0.0 + UNSET,
            margin,
            free,
            overflows,
            doubts,
            *ceiling,
            spread,
        )

    def _doubt(
        self,
        state: HeadroomState,
        size: Scalar,
        measured: Scalar,
        first: Scalar,
        ops: Ops,
    ) -> Scalar:
        """Count the alarms of the loss that the gradients do not confirm."""
        where, alarm = ops.where, state.loss - state.loss_envelope
        judged = (state.loss_envelope > UNSET) & (alarm >= ALARM) & (measured | first)
        false = measured & (size - state.envelope < alarm / 2.0)
        more = where(state.doubts < DOUBTS, state.doubts + 1.0, DOUBTS)
        return where(judged, where(false, more, 0.0), state.doubts)

    def _levels(
        self, state: HeadroomState, size: Scalar, ops: Ops
    ) -> tuple[Scalar, Scalar, Scalar, Scalar]:
        """Return this and the last gradient, corrected by the loss, and both levels.

        `foresee` handles what the loss predicts. So a gradient is reduced by the
        excess of its loss over the loss's level.
        """
        where, loss, last_loss = ops.where, state.loss, state.last_loss
        both = where(loss < last_loss, loss, last_loss)
        loss_level = self._follow(state.loss_envelope, loss, both, loss, ops)
        loss_level = where(loss > UNSET, loss_level, state.loss_envelope)
        believed = where(state.doubts < DOUBTS, loss_level, -UNSET)
        news = size - where(loss > believed, loss - believed, 0.0)
        last = state.last - where(last_loss > believed, last_loss - believed, 0.0)
        both = where(news < last, news, last)
        level = self._follow(state.envelope, size, both, news, ops)
        return news, last, loss_level, level

    def _follow(
        self, level: Scalar, now: Scalar, both: Scalar, start: Scalar, ops: Ops
    ) -> Scalar:
        """Rise at once to the lower of two steps; fall by a part of the gap."""
        where = ops.where
        gap = level - now
        gap = where(gap > UNIT, where(gap < 16 * UNIT, gap, 16 * UNIT), UNIT)
        fallen = level - ops.floor(gap / self.release_steps)
        return where(level > UNSET, where(both > fallen, both, fallen), start)

    def _learn(
        self, margin: Scalar, news: Scalar, last: Scalar, level: Scalar, ops: Ops
    ) -> Scalar:
        """Return the margin that a spike in the last step would have needed."""
        where = ops.where
        spike = last - where(news > level, news, level)
        extra = ops.floor(spike / 2)
        spike = spike + SAFETY + where(extra < SPREAD, extra, SPREAD)
        margin = margin - 1.0 - ops.floor(margin / 4096.0)
        margin = where(spike > margin, spike, margin)
        return where(margin > UNIT, margin, UNIT)

    def _price(
        self, margin: Scalar, free: Scalar, spare: Scalar, underflow: Scalar, ops: Ops
    ) -> tuple[Scalar, Scalar]:
        """Widen the margin while nothing underflows; narrow one that costs too much.

        Near the bottom, halving the scale doubles the loss, so the share of small
        gradients determines how many of the `spare` bits to keep.
        """
        where, c = ops.where, self.constants
        share, some = _log2(underflow, ops)
        spare = spare - where(some, share, UNSET)
        up, down = free + 2 * UNIT, free - 4 * UNIT
        wanted = spare + c.free_log2
        wanted = where(wanted < up, where(wanted > down, wanted, down), up)
        wanted = where(wanted < c.freest, wanted, c.freest)
        wanted = where(wanted > 0.0, wanted, 0.0)
        down = where(margin - CUT > CHEAPEST, margin - CUT, CHEAPEST)
        dear = spare + c.cost_log2
        dear = where(dear > down, dear, down)
        known = underflow >= 0.0  # not measured is NaN
        return where(known & (dear < margin), dear, margin), where(known, wanted, free)


def _log2(x: Scalar, ops: Ops) -> tuple[Scalar, Scalar]:
    """Return log2 of x in units, and whether x is in 2^-100 .. 2^100.

    Linear between powers of two, at most 0.09 too low: unlike log2 itself it has
    the same rounding on all backends, even if `floor(log2(x))` is off by one.
    """
    where = ops.where
    x = ops.cast(where(x < 1e38, x, 0.0), "float32")
    sane = (x > 2.0**-100) & (x < 2.0**100)
    x = where(sane, x, 1.0)
    whole = ops.floor(ops.log2(x))
    return whole * UNIT + ops.floor((x * ops.exp2(-whole) - 1.0) * UNIT), sane
