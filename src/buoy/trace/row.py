"""One step of a recorded run."""

import math
from typing import NamedTuple

from buoy._core.replay.trace import FP16_MAX_LOG2
from buoy._core.state import Verdict

__all__ = ["Row", "headroom"]


class Row(NamedTuple):
    """The outcome of one step.  All but the scale refer to unscaled gradients.

    None means "not measured": in large models the largest gradient is measured in some
    steps only, unless the policy uses it.

    Example:
        >>> Row(step=3, time=0.0, scale=65536.0, applied=True, amax=0.5).headroom
        0.999...
    """

    step: int
    time: float  # seconds since 1970
    scale: float  # that this step's loss was multiplied by
    applied: bool
    verdict: Verdict = Verdict.APPLIED
    norm: float | None = None
    amax: float | None = None
    loss: float | None = None
    offenders: tuple[str, ...] = ()
    max_log2: float = FP16_MAX_LOG2  # of the format

    @property
    def headroom(self) -> float | None:
        """Bits between the largest scaled gradient and the format's maximum."""
        return headroom(self.amax, self.scale, self.max_log2)


def headroom(
    amax: float | None, scale: float, max_log2: float = FP16_MAX_LOG2
) -> float | None:
    """Tell how many bits are left above a gradient of this unscaled size.

    Example:
        >>> headroom(amax=1.0, scale=2.0**10, max_log2=16.0)
        6.0
    """
    if amax is None or not scale > 0.0 or not amax > 0.0 or not math.isfinite(amax):
        return None
    return max_log2 - math.log2(amax) - math.log2(scale)
