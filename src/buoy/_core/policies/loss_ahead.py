"""Look at the loss before the backward pass: a wrapper for any policy.

A batch that is far off shows in its loss before its gradients exist.  Lowering the
scale of that one step saves the step, and the wrapped policy need not learn from it.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any

from buoy._core.bounds import bounds_of
from buoy._core.errors import ScaleCollapsedError
from buoy._core.ops import Ops, Precision, Scalar, ops_of
from buoy._core.policies.policy import Bounds, Policy
from buoy._core.policies.units import SIXTEENTH, floor_log2
from buoy._core.state import Seen, stores_scale
from buoy._core.step import MEASUREMENTS

__all__ = ["LossAhead", "LossAheadState", "unwrapped"]

# In binades: 1 binade is a factor of two.
FADE = SIXTEENTH  # that the level of the loss falls in a step
ALARM = 3.0  # a jump of the loss that the gradients must confirm by half
DOUBTS = 4.0  # false alarms without a true one, after which the loss is ignored
WILD = 256.0  # a log2 of larger magnitude was not measured
UNKNOWN = -1024.0  # of a loss or a gradient that was not seen


@dataclass(frozen=True, slots=True)
class LossAheadState:
    """The state of `LossAhead`.  Never validated: the fields may be tracers."""

    scale: Scalar  # the multiplier of this step's loss
    inner: Any  # the wrapped policy's state; its scale is set anew in every step
    jump: Scalar  # log2 of how far `scale` is below the policy's
    loss: Scalar  # log2 |loss| of this step, UNKNOWN before `foresee`
    last: Scalar  # the same of the step before
    level: Scalar  # of log2 |loss|
    size: Scalar  # log2 of the largest gradient of the last step without an alarm
    doubts: Scalar  # false alarms since the last true one

    @property
    def collapsed(self) -> Scalar:
        """Whether the wrapped policy gave up, as some presets do; None: never."""
        return getattr(self.inner, "collapsed", None)


@dataclass(frozen=True, slots=True, init=False)
class LossAhead:
    """Lower the scale of a step whose loss jumps; otherwise do as another policy.

    In binades, before the backward pass::

        jump = floor(loss - level), at least 0
        the scale of this step = the policy's scale - jump

    After it:

    1. The policy is shown the gradients as they would have been at its own scale, not
       the share of small ones, and sets the next scale.
    2. The level rises at once to the lower of this loss and the last, and falls by
       1/16 per step.
    3. A jump of 3 or more is an alarm.  It is false if the largest gradient is not half
       of it above that of the last step without an alarm.  After 4 false alarms
       without a true one the loss is ignored, until one is true.
    4. A step whose loss was not finite changes none of this.

    Alarms are judged only if the policy wants the size of the gradients: the wrapper
    measures nothing itself.

    `policy` is a policy or the name of one, with `parameters`.

    Example:
        >>> from buoy import Backoff
        >>> policy = LossAhead(Backoff())
        >>> state = policy.foresee(policy.init(), 2.0)
        >>> state = policy.update(state, Seen(finite=True))
        >>> jumps = policy.foresee(state, 2000.0)
        >>> state.scale, jumps.scale, policy.update(jumps, Seen(finite=True)).scale
        (65536.0, 128.0, 65536.0)
    """

    policy: Policy
    lowest: float = field(init=False, repr=False, compare=False)  # log2 of a scale

    def __init__(self, policy: str | Policy = "headroom", **parameters: Any) -> None:
        # Imported here: the table of names holds this class, too.
        from buoy._core.policies.registry import policy as named  # noqa: PLC0415

        made = named(policy, **parameters)
        low = math.ceil(math.log2(bounds_of(made).low))
        object.__setattr__(self, "policy", made)
        object.__setattr__(self, "lowest", float(low))

    @property
    def bounds(self) -> Bounds:
        """The policy's."""
        return self.policy.bounds

    @property
    def wants(self) -> frozenset[str]:
        """What the policy wants, and the loss."""
        return self.policy.wants | {"loss"}

    @property
    def precision(self) -> Precision:
        """The policy's; every number that the wrapper adds is exact in float32."""
        return self.policy.precision

    def init(self, *, scale: Scalar = None) -> LossAheadState:
        """Start the policy, at `scale` if given."""
        inner = self.policy.init(scale=scale)
        return LossAheadState(
            scale=inner.scale,
            inner=inner,
            jump=0.0,
            loss=UNKNOWN,
            last=UNKNOWN,
            level=UNKNOWN,
            size=UNKNOWN,
            doubts=0.0,
        )

    def foresee(
        self, state: LossAheadState, loss: Scalar, *, ops: Ops | None = None
    ) -> LossAheadState:
        """Lower the scale of this step by the jump of its loss."""
        if ops is None:
            ops = ops_of(loss, state.scale)
        where = ops.where
        inner = _at_own_scale(state, ops)
        if "loss" in self.policy.wants:
            inner = self.policy.foresee(inner, loss, ops=ops)
        size, usable = floor_log2(where(loss < 0, -loss, loss), ops)
        size = where(usable, size, UNKNOWN)
        size = where(size > state.loss, size, state.loss)  # if called again
        believed = (state.level > UNKNOWN) & (state.doubts < DOUBTS)
        jump = where(believed, ops.floor(size - state.level), 0.0)
        room = ops.floor(floor_log2(inner.scale, ops)[0]) - self.lowest
        jump = where(jump < room, jump, room)
        jump = where(jump > 0.0, jump, 0.0)
        lowered = inner.scale * ops.exp2(-jump)
        return replace(state, scale=lowered, inner=inner, jump=jump, loss=size)

    def update(
        self, state: LossAheadState, seen: Seen, *, ops: Ops | None = None
    ) -> LossAheadState:
        """Return the next state; its scale is the policy's."""
        if ops is None:
            ops = ops_of(seen.finite, state.scale)
        after = _learned(state, seen, ops)
        own = _at_own_scale(state, ops)
        shown = _at_scale_above(seen, state.jump, ops)
        try:
            inner = self.policy.update(own, shown, ops=ops)
        except ScaleCollapsedError as error:
            if error.state is not None:
                inner = error.state
                error.state = replace(after, scale=inner.scale, inner=inner)
            raise
        return replace(after, scale=inner.scale, inner=inner)


def unwrapped(policy: Policy) -> Policy:
    """Return the policy inside `LossAhead`, or the policy itself.

    Example:
        >>> from buoy import Static
        >>> unwrapped(LossAhead(Static())) == unwrapped(Static()) == Static()
        True
    """
    while isinstance(policy, LossAhead):
        policy = policy.policy
    return policy


def _at_own_scale(state: LossAheadState, ops: Ops) -> Any:
    """Return the policy's state with the scale that it set.

    From the scale of this step, because others may have set or bounded it.
    """
    if not stores_scale(state.inner):
        return state.inner
    return replace(state.inner, scale=state.scale * ops.exp2(state.jump))


def _at_scale_above(seen: Seen, jump: Scalar, ops: Ops) -> Seen:
    """Return what would have been seen at a scale that is 2^jump higher."""
    sizes = {
        one.name: value + jump
        for one in MEASUREMENTS.values()
        if one.in_log2 and (value := getattr(seen, one.name)) is not None
    }
    underflow = seen.underflow
    if underflow is not None:
        underflow = ops.where(jump > 0.0, math.nan, underflow)
    return replace(seen, **sizes, underflow=underflow)


def _learned(state: LossAheadState, seen: Seen, ops: Ops) -> LossAheadState:
    """Return the state with the level of the loss, and whether to believe it."""
    where = ops.where
    loss = state.loss
    level = state.level
    told = loss > UNKNOWN
    if seen.loss_finite is not None:
        told = told & seen.loss_finite
    both = where(loss < state.last, loss, state.last)
    fallen = level - FADE
    risen = where(both > fallen, both, fallen)
    risen = where(level > UNKNOWN, risen, loss)
    after = replace(
        state,
        jump=state.jump * 0.0,
        loss=loss * 0.0 + UNKNOWN,
        last=where(told, loss, state.last),
        level=where(told, risen, level),
    )
    if seen.amax_log2 is None:
        return after
    amax = seen.amax_log2
    measured = (amax > -WILD) & (amax < WILD)
    size = ops.cast(where(measured, amax, 0.0), "float32")
    size = ops.floor(size / SIXTEENTH) * SIXTEENTH - floor_log2(state.scale, ops)[0]
    height = where(told & (level > UNKNOWN), loss - level, 0.0)
    alarm = height >= ALARM
    quiet = told & (height < ALARM)
    overflow = where(seen.finite, False, True)
    false = seen.finite & measured & (size - state.size < height / 2.0)
    more = where(state.doubts < DOUBTS, state.doubts + 1.0, DOUBTS)
    judged = where(false, more, where(measured | overflow, 0.0, state.doubts))
    return replace(
        after,
        size=where(quiet & measured, size, state.size),
        doubts=where(alarm, judged, state.doubts),
    )
