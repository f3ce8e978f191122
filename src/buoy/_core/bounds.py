"""Keep every scale within bounds, whatever its policy returns.

Front ends and replay start and move a policy only through `initial`, `foreseen` and
`moved`.  On plain numbers a scale that is not a positive finite number is an error of
the policy.  On arrays nothing can be raised: the step leaves the state unchanged.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

from buoy._core.errors import PolicyError, ScaleCollapsedError
from buoy._core.formats import FLOAT32_MAX
from buoy._core.ops import PLAIN, Ops, Scalar, single
from buoy._core.policies.policy import Policy
from buoy._core.state import Seen, map_state, stores_scale

__all__ = ["MIN_SCALE", "Bounds", "bounds_of", "foreseen", "initial", "kept", "moved"]

MIN_SCALE = 2.0**-24  # the floor of policies that have none


class Bounds(NamedTuple):
    """The lowest and the highest scale of a policy."""

    low: float
    high: float
    peer: bool  # reproduces an existing scaler, with its faults: they are not errors
    policy: str  # the name of its class


def bounds_of(policy: Any) -> Bounds:
    """Return the bounds of a policy: its own, if it has any.

    Peers may start outside of theirs, and some ignore them: for these the floor is at
    most 2^-24.

    Example:
        >>> from buoy import Headroom
        >>> bounds_of(Headroom(min_scale=1.0))
        Bounds(low=1.0, high=1.8446744073709552e+19, peer=False, policy='Headroom')
    """
    low, high = getattr(policy, "min_scale", None), getattr(policy, "max_scale", None)
    start = float(policy.init().scale)
    if not isinstance(low, (int, float)) or not 0.0 < low < math.inf:
        low = min(MIN_SCALE, start) if start > 0.0 else MIN_SCALE
    if not isinstance(high, (int, float)) or not low <= high <= FLOAT32_MAX:
        high = FLOAT32_MAX
    peer = bool(getattr(policy, "reproduces_peer", False))
    if peer:
        quirks = getattr(policy, "quirks", None)
        floored = quirks is None or quirks.at_min != "none"
        low, high = min(low, MIN_SCALE) if floored else MIN_SCALE, FLOAT32_MAX
    # Where states are float32, so are their bounds: rounded outwards.
    low, high = min(low, single(low)), min(max(high, single(high)), FLOAT32_MAX)
    return Bounds(float(low), float(high), peer, type(policy).__name__)


def initial(policy: Policy) -> Any:
    """Return the policy's initial state; raise if its scale cannot be used.

    Example:
        >>> from buoy import Static
        >>> initial(Static(init_scale=8.0))
        StaticState(scale=8.0)
    """
    state = policy.init()
    if not _usable(state.scale):
        raise _unusable(type(policy).__name__, "init", None, state.scale)
    return state


def foreseen(
    policy: Policy, state: Any, loss: Scalar, *, ops: Ops, bounds: Bounds | None = None
) -> Any:
    """Return the policy's state for this step's loss, its scale within the bounds."""
    after = policy.foresee(state, loss, ops=ops)
    return kept(after, state, bounds or bounds_of(policy), ops, "foresee")


def moved(
    policy: Policy, state: Any, seen: Seen, *, ops: Ops, bounds: Bounds | None = None
) -> Any:
    """Return the policy's next state, its scale within the bounds.

    Raises what the policy raises; the state of a `ScaleCollapsedError` is bounded, too.

    Example:
        >>> import buoy
        >>> policy = buoy.policy("openseq2seq_logmax")
        >>> zeros = Seen(finite=True, amax_log2=-math.inf)
        >>> policy.update(policy.init(), zeros).scale
        nan
        >>> moved(policy, policy.init(), zeros, ops=PLAIN) == policy.init()
        True
    """
    bounds = bounds or bounds_of(policy)
    try:
        after = policy.update(state, seen, ops=ops)
    except ScaleCollapsedError as error:
        if error.state is not None:
            error.state = kept(error.state, state, bounds, ops)
        raise
    return kept(after, state, bounds, ops)


def kept(
    after: Any, before: Any, bounds: Bounds, ops: Ops, method: str = "update"
) -> Any:
    """Return a policy's new state with its scale within the bounds.

    A scale that is NaN, 0 or negative is unusable: the state stays as it was.  Other
    scales become the nearest bound.
    """
    if ops is PLAIN:
        if type(after.scale) is float and bounds.low <= after.scale <= bounds.high:
            return after
        return _kept_plain(after, before, bounds, method)
    usable, stored = after.scale > 0.0, stores_scale(after)
    if not stored:
        usable = (after.scale >= bounds.low) & (after.scale <= bounds.high)

    def held(new: Scalar, old: Scalar) -> Scalar:
        return new if old is None else ops.where(usable, new, old)

    state = map_state(held, after, before)
    if not stored:
        return state
    scale = ops.where(state.scale > bounds.low, state.scale, bounds.low)
    return replace(state, scale=ops.where(scale < bounds.high, scale, bounds.high))


def _kept_plain(after: Any, before: Any, bounds: Bounds, method: str) -> Any:
    if not _usable(after.scale) and not bounds.peer:
        raise _unusable(bounds.policy, method, before.scale, after.scale)
    state = after if after.scale > 0.0 else before
    scale = min(max(bounds.low, state.scale), bounds.high)  # NaN: the lower bound
    if scale == state.scale:
        return state
    return replace(state, scale=scale) if stores_scale(state) else before


def _usable(scale: Any) -> bool:
    number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    return number and 0.0 < scale < math.inf


def _unusable(policy: str, method: str, before: Any, after: Any) -> PolicyError:
    was = "" if before is None else f"; it was {before!r}"
    return PolicyError(
        f"The policy {policy} returned a scale of {after!r} from `{method}`{was}. A "
        "scale must be a positive finite number, or the gradients of the next steps "
        "are lost. Correct the policy; `buoy.testing.check_policy` shows the history "
        "that leads there."
    )
