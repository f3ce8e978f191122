"""The largest gradient of a step as Headroom sees it: measured, or from the norm.

Clipping computes the norm in every step.  The largest gradient takes another pass over
memory, and its distance from the norm changes slowly.  So it is measured now and then
(`schedule`), and inferred from the norm between.
"""

import math
from typing import NamedTuple

from buoy._core.ops import Ops, Scalar
from buoy._core.policies.headroom_ceiling import UNIT, UNSET
from buoy._core.state import Seen

__all__ = ["Size", "size_of"]

WILD = 256.0  # a log2 of larger magnitude was not measured
SLOW = 2.0  # the spread falls at once, and rises by 1 / SLOW of the gap


class Size(NamedTuple):
    """The size of a step's gradients."""

    log2: Scalar  # of the largest unscaled gradient, in units; if `known`
    known: Scalar
    zero: Scalar  # all gradients are 0
    spread: Scalar  # how far it is below the norm, UNSET before it was measured


def size_of(seen: Seen, used: Scalar, spread: Scalar, ops: Ops) -> Size:
    """Return the size of a step, whose scale was 2^used."""
    where, finite = ops.where, seen.finite
    amax = math.nan if seen.amax_log2 is None else seen.amax_log2
    known, zero = finite & (amax > -WILD) & (amax < WILD), finite & (amax < -WILD)
    log2 = ops.cast(where(known, amax, 0.0), "float32")
    log2 = ops.floor(log2 * UNIT) - used * UNIT
    norm = seen.norm_log2
    if norm is None:
        return Size(log2, known, zero, spread)
    sane = finite & (norm > -WILD) & (norm < WILD)
    top = ops.cast(where(sane, norm, 0.0), "float32")
    top = ops.floor(top * UNIT + 0.5) - used * UNIT  # backends round norms differently
    # A scale that is too low costs less than an overflow.
    gap = where(top > log2, top - log2, 0.0)
    slow = spread + ops.floor((gap - spread) / SLOW)
    gap = where((spread > UNSET) & (slow < gap), slow, gap)
    spread = where(known & sane, gap, spread)
    inferred = sane & (amax != amax)  # noqa: PLR0124 - NaN: not measured
    log2 = where(inferred, top - where(spread > UNSET, spread, 0.0), log2)
    return Size(log2, known | inferred, zero | (finite & (norm < -WILD)), spread)
