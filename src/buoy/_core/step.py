"""The arithmetic of one step, shared by every front end and by replay.

It works on single numbers.  The same functions run on Python floats, NumPy scalars,
torch tensors and JAX tracers; each backend has its `Ops`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from buoy._core.bounds import moved
from buoy._core.formats import FP16_MAX_LOG2
from buoy._core.ops import Ops, Scalar
from buoy._core.policies.policy import Policy
from buoy._core.state import Seen, State
from buoy._core.verdicts import Verdict

__all__ = [
    "BLOCK",
    "CLIP_EPSILON",
    "MEASUREMENTS",
    "SAMPLE",
    "SMALL",
    "SMALL_LOG2",
    "Decision",
    "Measurement",
    "Row",
    "as_wanted",
    "bounded_norm",
    "clip_factor",
    "decide",
    "sample_stride",
    "schedule",
]

SMALL_LOG2 = -20.0
SMALL = 2.0**SMALL_LOG2  # scaled gradients below it count in `Seen.underflow`
SAMPLE = 2**18  # approximate sample size for that count
BLOCK = 64  # neighbours of a tensor that are looked at together
CLIP_EPSILON = 1e-6  # as in `torch.nn.utils.clip_grad_norm_`


@dataclass(frozen=True, slots=True)
class Measurement:
    """A measurement of the gradients beyond `finite`, and its schedule.

    It is due at the turns `phase`, `phase + every`, `phase + 2 * every` and so on, and
    at the `first` ones; the first step is turn 0.  Of several ranks or optimizers the
    largest value counts.

    Example:
        >>> underflow = MEASUREMENTS["underflow"]
        >>> [turn for turn in range(50) if underflow.due(turn)]
        [15, 31, 47]
    """

    name: str  # as in `Policy.wants`, and the field of `Seen`
    in_log2: bool = False  # a front end measures x, and policies get log2(x)
    every: int = 1
    phase: int = 0
    first: int = 0

    def due(self, turn: Scalar) -> Scalar:
        """Return whether it is due at this turn, a Python int or a traced integer."""
        if self.every == 1:
            return True
        due = turn % self.every == self.phase
        return (turn < self.first) | due if self.first else due


MEASUREMENTS = {
    measurement.name: measurement
    for measurement in (
        Measurement("amax_log2", in_log2=True),
        # Counting small gradients costs a separate pass over a sample of them.
        Measurement("underflow", every=16, phase=15),
    )
}


# Beside the norm, the largest gradient is one more pass over memory.  An odd period
# meets both of two tasks that alternate.
_SPARSE = Measurement("amax_log2", in_log2=True, every=3, first=16)


def schedule(wants: frozenset[str], *, clips: bool) -> dict[str, Measurement]:
    """Return what is measured for a policy.

    `clips`: whether gradients are clipped by a norm of order 1 or more.

    Example:
        >>> wants = frozenset({"amax_log2", "sparse", "loss"})
        >>> [(one.name, one.every) for one in schedule(wants, clips=True).values()]
        [('amax_log2', 3)]
        >>> [(one.name, one.every) for one in schedule(wants, clips=False).values()]
        [('amax_log2', 1)]
    """
    found = {name: one for name, one in MEASUREMENTS.items() if name in wants}
    if clips and {"amax_log2", "sparse"} <= wants:
        found["amax_log2"] = _SPARSE
    return found


def as_wanted(
    measured: Mapping[str, Scalar], log2: Callable[[Scalar], Scalar]
) -> dict[str, Scalar]:
    """Return measurements as policies read them, for the fields of `Seen`.

    Example:
        >>> from buoy._core.ops import PLAIN
        >>> as_wanted({"amax_log2": 8.0, "underflow": 0.25}, PLAIN.log2)
        {'amax_log2': 3.0, 'underflow': 0.25}
    """
    return {
        name: log2(value) if MEASUREMENTS[name].in_log2 else value
        for name, value in measured.items()
    }


def sample_stride(count: int) -> int:
    """Return the stride of the sample of `count` gradients.

    One block in `stride` is searched for small gradients.  Every front end looks at
    the same elements: of each flattened tensor the first 64 in every 64 x stride.  The
    stride has no factor 2 or 3, so that the blocks reach all columns of a matrix whose
    width is 64 times a product of them.

    Example:
        >>> [sample_stride(count) for count in (0, 2**18, 2**19, 30_000_000)]
        [1, 1, 5, 115]
    """
    stride = max(1, -(-count // SAMPLE))
    while math.gcd(stride, 6) > 1:
        stride += 1
    return stride


class Decision(NamedTuple):
    """The decision about a step."""

    applied: Scalar  # bool []
    state: State  # the policy's, for the next step
    factor: Scalar  # float32 []: gradients x factor are unscaled and clipped


class Row(NamedTuple):
    """The outcome of one step, as plain numbers: in `last_step`, logs and traces.

    All sizes but the scales are those of unscaled values.  None means "not measured":
    in large models the largest gradient is measured in some steps only, unless the
    policy uses it.

    Example:
        >>> row = Row(step=3, scale=65536.0, applied=True, amax=0.5)
        >>> row.verdict.value, row.norm, round(row.headroom, 2)
        ('applied', None, 1.0)
    """

    step: int
    scale: float  # that this step's loss was multiplied by
    applied: bool
    verdict: Verdict = Verdict.APPLIED
    next_scale: float | None = None  # None in a recorded run: the next row has it
    norm: float | None = None  # before clipping; inf or NaN if the gradients are
    amax: float | None = None  # the largest gradient
    loss: float | None = None
    offenders: tuple[str, ...] = ()  # names of the parameters that were not finite
    collapsed: bool = False  # the policy gave up, on a device; on the host it raises
    time: float = 0.0  # seconds since 1970, in a recorded run
    max_log2: float = FP16_MAX_LOG2  # of the format

    @property
    def skipped(self) -> bool:
        """Whether the weights were not updated."""
        return not self.applied

    @property
    def headroom(self) -> float | None:
        """Bits between the largest scaled gradient and the format's maximum."""
        amax = self.amax
        if amax is None or not 0.0 < amax < math.inf or not self.scale > 0.0:
            return None
        return self.max_log2 - math.log2(amax) - math.log2(self.scale)


def decide(
    policy: Policy,
    state: State,
    seen: Seen,
    *,
    inverse: Scalar,
    norm: Scalar = None,
    max_norm: Scalar = None,
    ops: Ops,
) -> Decision:
    """Decide whether to apply a step and with which factor, and move the scale.

    `inverse` is 1 / scale, `norm` the unscaled norm, which is required with
    `max_norm`.  The next scale is within the policy's bounds (`moved`).  Raises what
    the policy raises, e.g. `ScaleCollapsedError`.

    Example:
        >>> from buoy import Backoff
        >>> from buoy._core.ops import PLAIN
        >>> policy = Backoff(init_scale=8.0)
        >>> seen = Seen(finite=False)
        >>> decided = decide(policy, policy.init(), seen, inverse=0.125, ops=PLAIN)
        >>> decided.applied, decided.state.scale, decided.factor
        (False, 4.0, 0.125)
    """
    after = moved(policy, state, seen, ops=ops)
    factor = inverse
    if max_norm is not None:
        factor = inverse * clip_factor(norm, max_norm, ops)
    return Decision(seen.finite, after, factor)


def clip_factor(norm: Scalar, max_norm: Scalar, ops: Ops) -> Scalar:
    """Return the clip factor of gradients of this norm: min(1, max_norm / norm).

    As in torch, 1e-6 is added to the norm.  For `max_norm` >= 0 the factor is in
    [0, 1] and never NaN: an infinite `max_norm` gives 1 whatever the norm, a NaN
    of either gives 1, and an infinite norm gives 0.  (A step whose gradients are not
    finite is skipped anyway.)  A norm of 0 gives 1 for every `max_norm` from 1e-6 on;
    below that the factor of the zeros makes no difference.

    Example:
        >>> from buoy._core.ops import PLAIN
        >>> clip_factor(0.5, 1.0, PLAIN), round(clip_factor(4.0, 1.0, PLAIN), 3)
        (1.0, 0.25)
    """
    ratio = max_norm / (norm + CLIP_EPSILON)
    return ops.where(ratio < 1.0, ratio, 1.0)


def bounded_norm(amax: Scalar, count: int, order: float = 2.0) -> Scalar:
    """Return a bound of the norm of `count` numbers: count^(1 / order) x amax.

    Used if the sum of powers overflows although every number is finite.  The
    gradients are then clipped harder than necessary, but the step is not skipped.

    Example:
        >>> bounded_norm(1e30, 4)
        2e+30
    """
    return amax * float(count) ** (1.0 / order)
