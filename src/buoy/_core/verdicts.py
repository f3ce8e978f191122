"""Why a step was skipped, judged on plain numbers; front ends bring the facts."""

import math
from collections.abc import Sequence
from itertools import pairwise

from buoy._core.state import Verdict

__all__ = ["EXPLAINED", "HISTORY", "judge_losses"]

HISTORY = 32  # losses of earlier steps that are kept
_LEAST = 4  # fewer tell nothing
_OUTLIER = 8.0  # times the usual loss
_CLIMB = 4.0  # times the start of the climb

EXPLAINED = {
    Verdict.APPLIED: "applied",
    Verdict.SCALE_TOO_HIGH: "the scale was too high: normal, it falls by itself",
    Verdict.FORWARD_NONFINITE: (
        "the loss was inf or NaN before it was scaled: no scale can cure that; look at "
        "the inputs, the labels and the module that first turns non-finite"
    ),
    Verdict.POISONED: (
        "weights or optimizer state are already inf or NaN: go back to a checkpoint"
    ),
    Verdict.STALE_GRADS: (
        "the non-finite gradients of an earlier step were never cleared: call "
        "`optimizer.zero_grad()` in every iteration, also after a skipped step"
    ),
    Verdict.BAD_BATCH: (
        "this batch's loss stands far out of the others: look at its data"
    ),
    Verdict.DIVERGENCE: (
        "the loss has been climbing for several steps: lower the learning rate or clip"
    ),
    Verdict.SPIKE: (
        "the gradient norm stood far out of its usual range: the spike guard acted"
    ),
    Verdict.NO_GRADS: "no parameter had a gradient",
}


def judge_losses(now: Sequence[float], before: Sequence[float]) -> Verdict:
    """Name the cause of a skip from this step's losses and those of the steps before.

    In order: the loss was non-finite before it was scaled; it has been climbing; it
    stands out of the others; and else the scale was too high, which is normal.

    Example:
        >>> judge_losses([90.0], [1.0, 1.1, 0.9, 1.0]).value
        'bad_batch'
    """
    if any(not math.isfinite(loss) for loss in now):
        return Verdict.FORWARD_NONFINITE
    sizes = [abs(loss) for loss in before if math.isfinite(loss)]
    if not now or len(sizes) < _LEAST:
        return Verdict.SCALE_TOO_HIGH
    latest = max(abs(loss) for loss in now)
    if _climbs([*sizes, latest]):
        return Verdict.DIVERGENCE
    usual = sorted(sizes)[len(sizes) // 2]
    if latest > _OUTLIER * max(usual, 1e-30):
        return Verdict.BAD_BATCH
    return Verdict.SCALE_TOO_HIGH


def _climbs(sizes: Sequence[float]) -> bool:
    """Say whether the last losses rose step by step, and far."""
    tail = sizes[-_LEAST - 1 :]
    rising = all(a < b for a, b in pairwise(tail))
    return rising and tail[-2] > _CLIMB * tail[0]
