"""One step of the front ends that keep their state in variables: Keras, TensorFlow.

A front end reads the policy's state from its variables, looks at the gradients, calls
`advance`, writes the state back, and applies the gradients times `factor` if `applied`.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from buoy._core import bounds
from buoy._core.formats import FLOAT32_MAX
from buoy._core.ops import Ops, Scalar
from buoy._core.policies.policy import Policy
from buoy._core.policies.start import exponent_of
from buoy._core.ring import NOT_MEASURED, Measured, line_of
from buoy._core.state import Seen, State, map_state, stores_scale
from buoy._core.step import as_wanted, decide

__all__ = [
    "LARGEST_HALF",
    "Advanced",
    "Found",
    "advance",
    "capped",
    "foreseen",
    "single",
]

LARGEST_HALF = 2.0**15  # the largest power of two that FP16 holds


class Found(NamedTuple):
    """The findings about the gradients of one step."""

    bad: Scalar  # bool [gradients]: not finite, or not once unscaled
    finite: Scalar  # bool []: none of them
    amax: Scalar  # float32 []: the largest magnitude
    norm: Scalar = None  # float32 []; None: not measured


class Advanced(NamedTuple):
    """The decision about a step, and its row in the log."""

    applied: Scalar  # bool []
    state: State  # the policy's, for the next step
    factor: Scalar  # float32 []: gradients x factor are unscaled
    line: tuple[Scalar, ...]  # the numbers of `ring.COLUMNS`


def advance(
    policy: Policy,
    state: State,
    found: Found,
    measured: Mapping[str, Scalar],
    *,
    carried: Scalar,
    loss: Measured = NOT_MEASURED,
    loss_finite: Scalar = None,
    ops: Ops,
) -> Advanced:
    """Decide about a step and move the scale.

    `carried` is the scale that the gradients carry: `state.scale`, or 1 if they are
    unscaled already.  `measured` has what the policy wants besides `amax_log2`, as
    `as_wanted` takes it.  `loss_finite` is None if it is not known, or not wanted.

    Example:
        >>> from buoy import Backoff
        >>> from buoy._core.ops import PLAIN
        >>> policy = Backoff(init_scale=8.0)
        >>> found = Found([False, True], False, 1e5, 1e5)
        >>> made = advance(policy, policy.init(), found, {}, carried=8.0, ops=PLAIN)
        >>> made.applied, made.state.scale, made.factor
        (False, 4.0, 0.125)
    """
    inverse = 1.0 / carried
    sizes = dict(measured)
    if "amax_log2" in policy.wants:
        sizes["amax_log2"] = found.amax * (single(state.scale, ops) * inverse)
    seen = Seen(
        finite=found.finite,
        loss_finite=loss_finite,
        **as_wanted(sizes, exponent_of),
    )
    applied, after, factor = decide(policy, state, seen, inverse=inverse, ops=ops)
    norm = NOT_MEASURED
    if found.norm is not None:
        norm = Measured(_no_nan(found.norm * inverse, ops))
    line = line_of(
        single(state.scale, ops),
        single(after.scale, ops),
        applied,
        norm=norm,
        amax=Measured(_no_nan(found.amax * inverse, ops)),
        loss=loss,
    )
    return Advanced(applied, after, factor, line)


def _no_nan(size: Scalar, ops: Ops) -> Scalar:
    """Replace NaN by inf: a size of gradients that are not finite."""
    return ops.where(size >= 0.0, size, math.inf)


def single(scale: Scalar, ops: Ops) -> Scalar:
    """Return a scale in float32, and finite: presets may exceed its range.

    Example:
        >>> from buoy._core.ops import PLAIN
        >>> single(1e300, PLAIN) == FLOAT32_MAX
        True
    """
    return ops.cast(ops.where(scale < FLOAT32_MAX, scale, FLOAT32_MAX), "float32")


def foreseen(
    policy: Policy, state: State, loss: Scalar, *, known: Scalar, ops: Ops
) -> State:
    """Return the state after the policy has seen the loss, unless one was `known`.

    Several losses of one step must carry one scale: only the first may lower it.

    Example:
        >>> from buoy import Headroom
        >>> from buoy._core.ops import PLAIN
        >>> policy = Headroom()
        >>> foreseen(policy, policy.init(), 0.5, known=False, ops=PLAIN).scale
        256.0
    """
    if "loss" not in policy.wants:
        return state
    after = bounds.foreseen(policy, state, loss, ops=ops)
    return map_state(lambda old, new: ops.where(known, old, new), state, after)


def capped(policy: Policy, state: State, ops: Ops) -> State:
    """Return the state for a loss in FP16, whose cotangent is the scale itself.

    A policy that places the scale by measurement cannot know that limit; the classic
    rules find it by an overflow, as their peers do.

    Example:
        >>> from buoy import Headroom
        >>> from buoy._core.ops import PLAIN
        >>> policy = Headroom()
        >>> capped(policy, policy.init(scale=2.0**20), PLAIN).scale
        32768.0
    """
    if "amax_log2" not in policy.wants or not stores_scale(state):
        return state
    scale = ops.where(state.scale < LARGEST_HALF, state.scale, LARGEST_HALF)
    return replace(state, scale=scale)
