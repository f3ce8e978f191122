"""The arithmetic of one step, shared by every front end and by replay.

Everything here is O(1): numbers, not tensors.  The same functions run on Python
floats, NumPy scalars, torch tensors and JAX tracers; a backend brings its `Ops`.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from buoy._core.ops import Ops, Scalar
from buoy._core.policies.policy import Policy
from buoy._core.state import Seen
from buoy._core.verdicts import Verdict

__all__ = [
    "CLIP_EPSILON",
    "MEASUREMENTS",
    "SMALL",
    "SMALL_LOG2",
    "Decision",
    "Measurement",
    "Row",
    "bounded_norm",
    "clip_factor",
    "decide",
    "is_applied",
]

SMALL_LOG2 = -20.0
SMALL = 2.0**SMALL_LOG2  # scaled gradients below it count in `Seen.underflow`
CLIP_EPSILON = 1e-6  # the one of `torch.nn.utils.clip_grad_norm_`


@dataclass(frozen=True, slots=True)
class Measurement:
    """What can be measured of the gradients beyond `finite`, and when.

    It is taken at the turns `phase`, `phase + every`, `phase + 2 * every` and so on;
    the first step is turn 0.  `reduce` combines the values of ranks and optimizers.

    Example:
        >>> underflow = MEASUREMENTS["underflow"]
        >>> [turn for turn in range(50) if underflow.due(turn)]
        [15, 31, 47]
    """

    name: str  # as in `Policy.wants`, and the field of `Seen`
    every: int = 1
    phase: int = 0
    reduce: Literal["max", "mean"] = "max"

    def due(self, turn: Scalar) -> Scalar:
        """Say whether it is taken at this turn, a Python int or a traced integer."""
        return self.every == 1 or turn % self.every == self.phase


MEASUREMENTS = {
    measurement.name: measurement
    for measurement in (
        Measurement("amax_log2"),
        # Counting small gradients costs a pass of its own.
        Measurement("underflow", every=16, phase=15),
    )
}


class Decision(NamedTuple):
    """What follows from what a step's gradients showed."""

    applied: Scalar  # bool []
    state: Any  # the policy's, for the next step
    factor: Scalar  # float32 []: gradients x factor are unscaled and clipped


class Row(NamedTuple):
    """What became of one step, on plain numbers; None is "not measured".

    Example:
        >>> Row(0, 8.0, 4.0, False, Verdict.BAD_BATCH, loss=3.5).norm is None
        True
    """

    step: int
    scale: float  # that this step's loss was multiplied by
    next_scale: float
    applied: bool
    verdict: Verdict
    norm: float | None = None  # of the unscaled gradients, like `amax`
    amax: float | None = None
    loss: float | None = None
    offenders: tuple[str, ...] = ()  # names of the parameters that were not finite


def decide(
    policy: Policy,
    state: Any,
    seen: Seen,
    *,
    inverse: Scalar,
    norm: Scalar = None,
    max_norm: Scalar = None,
    ops: Ops,
) -> Decision:
    """Decide whether to apply a step, with which factor, and move the scale.

    `inverse` is 1 / scale, `norm` the unscaled norm; it is needed where `max_norm`
    is given.  Raises what the policy raises, e.g. `ScaleCollapsedError`.

    Example:
        >>> from buoy import Backoff
        >>> from buoy._core.ops import PLAIN
        >>> policy = Backoff(init_scale=8.0)
        >>> seen = Seen(finite=False)
        >>> decided = decide(policy, policy.init(), seen, inverse=0.125, ops=PLAIN)
        >>> decided.applied, decided.state.scale, decided.factor
        (False, 4.0, 0.125)
    """
    applied = is_applied(policy, seen)
    after = policy.update(state, seen, ops=ops)
    factor = inverse
    if max_norm is not None:
        factor = inverse * clip_factor(norm, max_norm, ops)
    return Decision(applied, after, factor)


def is_applied(policy: Policy, seen: Seen) -> Scalar:
    """Say whether a step is applied: only if it is finite and the policy agrees.

    `policy.applies` can veto a finite step.  It cannot have a non-finite one applied:
    presets that say so describe a peer that does not check.

    Example:
        >>> from buoy import Static
        >>> policy, seen = Static(skip=False), Seen(finite=False)
        >>> policy.applies(seen), is_applied(policy, seen)
        (True, False)
    """
    return seen.finite & policy.applies(seen)


def clip_factor(norm: Scalar, max_norm: Scalar, ops: Ops) -> Scalar:
    """Return what gradients of this norm are multiplied by: min(1, max_norm / norm).

    As in torch, 1e-6 is added to the norm.  For `max_norm` >= 0 the factor lies in
    [0, 1] and is never NaN: an infinite `max_norm` gives 1 whatever the norm, a NaN
    of either gives 1, and an infinite norm gives 0.  (A step whose gradients are not
    finite is skipped anyway.)  A norm of 0 gives 1 for every `max_norm` from 1e-6 on;
    below, what the zeros are multiplied by makes no difference.

    Example:
        >>> from buoy._core.ops import PLAIN
        >>> clip_factor(0.5, 1.0, PLAIN), round(clip_factor(4.0, 1.0, PLAIN), 3)
        (1.0, 0.25)
    """
    ratio = max_norm / (norm + CLIP_EPSILON)
    return ops.where(ratio < 1.0, ratio, 1.0)


def bounded_norm(amax: Scalar, count: int, order: float = 2.0) -> Scalar:
    """Bound the norm of `count` numbers up to `amax`: count^(1 / order) x amax.

    For a sum of powers that overflows though every number is finite.  The gradients
    are then clipped harder than necessary, and are not called non-finite.

    Example:
        >>> bounded_norm(1e30, 4)
        2e+30
    """
    return amax * float(count) ** (1.0 / order)
