"""Keep every scale within bounds, whatever its policy returns.

Front ends and replay start and move a policy only through `initial`, `foreseen` and
`moved`.  On plain numbers a scale that is not a positive finite number is an error of
the policy.  On arrays nothing can be raised: the step leaves the state unchanged.
"""

import math
from dataclasses import replace

from buoy._core.errors import PolicyError, ScaleCollapsedError
from buoy._core.formats import FLOAT32_MAX
from buoy._core.ops import PLAIN, Ops, Scalar, ops_of, single
from buoy._core.policies.policy import Bounds, Policy
from buoy._core.state import Seen, State, map_state, stores_scale

__all__ = ["bounds_of", "foreseen", "initial", "moved"]


def bounds_of(policy: Policy) -> Bounds:
    """Return the bounds of a policy, rounded outwards to float32, as states are.

    Example:
        >>> from buoy import Headroom
        >>> bounds_of(Headroom(min_scale=1.0, max_scale=1024.0))
        Bounds(low=1.0, high=1024.0, peer=False)
    """
    low, high, peer = policy.bounds
    if not 0.0 < low <= high:
        message = (
            f"{type(policy).__name__}: `bounds` must be positive and in order, "
            f"got {low!r} .. {high!r}."
        )
        raise PolicyError(message)
    low = min(low, single(low))
    high = min(max(high, single(high)), FLOAT32_MAX)
    return Bounds(low, high, peer)


def initial(policy: Policy, scale: Scalar = None) -> State:
    """Return the policy's initial state; raise if its scale cannot be used.

    Example:
        >>> from buoy import Static
        >>> initial(Static(init_scale=8.0))
        StaticState(scale=8.0)
    """
    state = policy.init(scale=scale)
    if ops_of(state.scale) is PLAIN and not _usable(state.scale):
        raise _unusable(policy, "init", None, state.scale)
    return state


def foreseen(
    policy: Policy,
    state: State,
    loss: Scalar,
    *,
    ops: Ops,
    bounds: Bounds | None = None,
) -> State:
    """Return the policy's state for this step's loss, its scale within the bounds."""
    after = policy.foresee(state, loss, ops=ops)
    return _kept(policy, after, state, bounds or bounds_of(policy), ops, "foresee")


def moved(
    policy: Policy, state: State, seen: Seen, *, ops: Ops, bounds: Bounds | None = None
) -> State:
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
            error.state = _kept(policy, error.state, state, bounds, ops, "update")
        raise
    return _kept(policy, after, state, bounds, ops, "update")


def _kept(
    policy: Policy, after: State, before: State, bounds: Bounds, ops: Ops, method: str
) -> State:
    """Return a policy's new state with its scale within the bounds.

    A scale that is NaN, 0 or negative is unusable: the state stays as it was.  Other
    scales become the nearest bound.
    """
    if ops is PLAIN:
        if type(after.scale) is float and bounds.low <= after.scale <= bounds.high:
            return after
        return _kept_plain(policy, after, before, bounds, method)
    stored = stores_scale(after)
    usable = after.scale > 0.0
    if not stored:
        usable = (after.scale >= bounds.low) & (after.scale <= bounds.high)

    def held(new: Scalar, old: Scalar) -> Scalar:
        return new if old is None else ops.where(usable, new, old)

    state = map_state(held, after, before)
    if not stored:
        return state
    scale = ops.where(state.scale > bounds.low, state.scale, bounds.low)
    return replace(state, scale=ops.where(scale < bounds.high, scale, bounds.high))


def _kept_plain(
    policy: Policy, after: State, before: State, bounds: Bounds, method: str
) -> State:
    if not _usable(after.scale) and not bounds.peer:
        raise _unusable(policy, method, before.scale, after.scale)
    state = after if after.scale > 0.0 else before
    scale = min(max(bounds.low, state.scale), bounds.high)  # NaN: the lower bound
    if scale == state.scale:
        return state
    return replace(state, scale=scale) if stores_scale(state) else before


def _usable(scale: Scalar) -> bool:
    number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    return number and 0.0 < scale < math.inf


def _unusable(
    policy: Policy, method: str, before: object, after: object
) -> PolicyError:
    was = "" if before is None else f"; it was {before!r}"
    return PolicyError(
        f"The policy {type(policy).__name__} returned a scale of {after!r} from "
        f"`{method}`{was}. A scale must be a positive finite number, or the gradients "
        "of the next steps are lost. Correct the policy; `buoy.testing.check_policy` "
        "shows the history that leads there."
    )
