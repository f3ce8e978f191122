"""Detect gradient norms that are outliers of their running distribution.

Two running means track log2 of the norm: its centre, and its mean deviation.  Both are
updated with a deviation clipped at the limit, so that a spike hardly moves them.  After
`patience` spikes in a row the new level is accepted.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from buoy._core.checks import choice, number, whole
from buoy._core.ops import PLAIN, Ops, Scalar

__all__ = ["Judged", "SpikeGuard", "SpikeState"]

_FINITE = 300.0  # |log2| of a float32 norm stays below; -inf and NaN do not


@dataclass(frozen=True, slots=True)
class SpikeState:
    """The running distribution of log2(norm)."""

    count: Scalar  # float32 []: norms since the start, or since a new level
    centre: Scalar  # float32 []
    spread: Scalar  # float32 []: mean distance from the centre
    row: Scalar  # float32 []: spikes in a row
    spikes: Scalar  # float32 []: in total


class Judged(NamedTuple):
    """The result of a test of a norm."""

    state: SpikeState
    spike: Scalar  # bool []
    limit: Scalar  # float32 []: log2 of the largest norm that is no spike


@dataclass(frozen=True, slots=True, kw_only=True)
class SpikeGuard:
    """Skip, or clip, a step whose unscaled gradient norm is an outlier.

    A norm is a spike if it is more than `threshold` mean deviations (of its logarithm),
    and more than a factor of `least`, above the usual norm.  The first `warmup` steps
    are never spikes.  `memory` is the span of the running distribution, in steps.
    After `patience` spikes in a row, the new level is accepted.

    Example:
        >>> guard = SpikeGuard(warmup=4)
        >>> state = guard.init()
        >>> for norm in (0.0, 0.5, -0.5, 0.25, 9.0):
        ...     state, spike, limit = guard.look(state, norm)
        >>> spike, state.spikes
        (True, 1.0)
    """

    mode: Literal["skip", "clip"] = "skip"
    threshold: float = 8.0
    least: float = 4.0
    warmup: int = 64
    memory: int = 100
    patience: int = 4

    def __post_init__(self) -> None:
        choice(self, "mode", ("skip", "clip"))
        number(self, "threshold", above=0.0, below=1e6)
        number(self, "least", least=1.0, below=1e6)
        for field in ("warmup", "memory", "patience"):
            whole(self, field, least=1)

    def init(self) -> SpikeState:
        """Return the initial state."""
        return SpikeState(0.0, 0.0, 0.0, 0.0, 0.0)

    def look(self, state: SpikeState, norm_log2: Scalar, *, ops: Ops = PLAIN) -> Judged:
        """Test the norm of one step and update the state; inf, NaN and 0 are ignored.

        Branch-free, like a policy's rule: it runs on a device without a host read.
        """
        valid = (norm_log2 > -_FINITE) & (norm_log2 < _FINITE)
        off = ops.where(valid, norm_log2, state.centre) - state.centre
        reach = ops.where(
            state.spread * self.threshold > PLAIN.log2(self.least),
            state.spread * self.threshold,
            PLAIN.log2(self.least),
        )
        ready = state.count >= self.warmup
        far = valid & ready & (off > reach)
        spike = far & (state.row < self.patience)
        moved = far & (state.row >= self.patience)
        limit = state.centre + reach
        learnt = self._learn(state, off, reach, ready, ops)
        after = SpikeState(
            ops.where(moved, 1.0, learnt.count),
            ops.where(moved, state.centre + off, learnt.centre),
            ops.where(moved, state.spread, learnt.spread),
            ops.where(spike, state.row + 1.0, 0.0),
            ops.where(spike, state.spikes + 1.0, state.spikes),
        )
        return Judged(_chosen(valid, after, state, ops), spike, limit)

    def _learn(
        self, state: SpikeState, off: Scalar, reach: Scalar, ready: Scalar, ops: Ops
    ) -> SpikeState:
        """Update both means; after the warm-up the deviation is clipped."""
        cut = ops.where(off > reach, reach, ops.where(off < -reach, -reach, off))
        cut = ops.where(ready, cut, off)
        early = state.count < self.memory - 1.0
        rate = ops.where(early, 1.0 / (state.count + 1.0), 1.0 / self.memory)
        first = state.count < 1.0
        size = ops.where(cut < 0.0, -cut, cut)
        return SpikeState(
            state.count + 1.0,
            state.centre + ops.where(first, 1.0, rate) * cut,
            ops.where(first, 0.0, state.spread + rate * (size - state.spread)),
            state.row,
            state.spikes,
        )


def _chosen(
    condition: Scalar, one: SpikeState, other: SpikeState, ops: Ops
) -> SpikeState:
    return SpikeState(
        ops.where(condition, one.count, other.count),
        ops.where(condition, one.centre, other.centre),
        ops.where(condition, one.spread, other.spread),
        ops.where(condition, one.row, other.row),
        ops.where(condition, one.spikes, other.spikes),
    )
