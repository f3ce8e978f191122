"""Verdicts, the reasons for skipped steps: names, a table of meanings, loss rules.

To add one, add a name to `Verdict`, an entry to `VERDICTS`, a row to the tables of
`docs/guides/skipped-steps.md`, `docs/guides/jax.md` and `docs/wrong/index.md`, and the
code that sets it: CONTRIBUTING.md says where.
"""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["HISTORY", "VERDICTS", "Meaning", "Verdict", "judge_losses"]

HISTORY = 32  # losses of earlier steps that are kept
_LEAST = 4  # losses: fewer show nothing
_OUTLIER = 8.0  # times the usual loss
_CLIMB = 4.0  # times the start of the climb


class Verdict(enum.StrEnum):
    """The reason for a skipped step, or `applied`.

    Example:
        >>> Verdict("bad_batch").name
        'BAD_BATCH'
    """

    APPLIED = "applied"
    SCALE_TOO_HIGH = "scale_too_high"
    FORWARD_NONFINITE = "forward_nonfinite"
    POISONED = "poisoned"
    STALE_GRADS = "stale_grads"
    BAD_BATCH = "bad_batch"
    DIVERGENCE = "divergence"
    NO_GRADS = "no_grads"
    SPIKE = "spike"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """The meaning of a verdict, for messages, reports and re-runs.

    Example:
        >>> VERDICTS[Verdict.POISONED].text
        'weights or optimizer state are already inf or NaN; go back to a checkpoint'
        >>> VERDICTS[Verdict.POISONED].sentences
        'Weights or optimizer state are already inf or NaN. Go back to a checkpoint.'
    """

    seen: str
    remedy: str = ""  # what to do; empty if nothing
    normal: bool = False  # expected now and then in a healthy run
    overflow: bool = True  # some number was not finite
    curable: bool = False  # the same batch may succeed at a lower scale
    grave: bool = False  # no scale cures it: the user must act
    marker: str = "circle"  # in the report's charts

    @property
    def text(self) -> str:
        """Both parts, for use in a sentence."""
        return f"{self.seen}; {self.remedy}" if self.remedy else self.seen

    @property
    def sentences(self) -> str:
        """Both parts as separate sentences."""
        parts = [part for part in (self.seen, self.remedy) if part]
        return " ".join(f"{part[0].upper()}{part[1:]}." for part in parts)


VERDICTS = {
    Verdict.APPLIED: Meaning(
        seen="the step was applied",
        normal=True,
        overflow=False,
    ),
    Verdict.SCALE_TOO_HIGH: Meaning(
        seen="the scale was too high",
        remedy="this is normal, the scale falls by itself",
        normal=True,
        curable=True,
        marker="inverted_triangle",
    ),
    Verdict.FORWARD_NONFINITE: Meaning(
        seen="the loss was inf or NaN before it was scaled",
        remedy=(
            "no scale can fix this: check the inputs, the labels and the first module "
            "whose output is not finite"
        ),
        grave=True,
        marker="x",
    ),
    Verdict.POISONED: Meaning(
        seen="weights or optimizer state are already inf or NaN",
        remedy="go back to a checkpoint",
        grave=True,
        marker="square_cross",
    ),
    Verdict.STALE_GRADS: Meaning(
        seen="the non-finite gradients of an earlier step were never cleared",
        remedy=(
            "call `optimizer.zero_grad()` in every iteration, also after a skipped step"
        ),
        grave=True,
        marker="diamond",
    ),
    Verdict.BAD_BATCH: Meaning(
        seen="the loss of this batch was far above that of the others",
        remedy="look at its data",
        normal=True,
        curable=True,
        marker="plus",
    ),
    Verdict.DIVERGENCE: Meaning(
        seen="the loss has been rising for several steps",
        remedy="lower the learning rate or clip",
        curable=True,
        marker="star",
    ),
    Verdict.NO_GRADS: Meaning(
        seen="no parameter had a gradient",
        overflow=False,
    ),
    Verdict.SPIKE: Meaning(
        seen="the gradient norm was far above its usual range: the spike guard acted",
        overflow=False,
        marker="triangle",
    ),
}


def judge_losses(now: Sequence[float], before: Sequence[float]) -> Verdict:
    """Return the reason for a skip, from the losses of this step and previous steps.

    In order: the loss was non-finite before it was scaled; it has been rising; it is
    far above the others; else the scale was too high, which is normal.

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
    """Return whether the last losses rose at every step, and by a large factor."""
    tail = sizes[-_LEAST - 1 :]
    rising = all(a < b for a, b in pairwise(tail))
    # By that factor already before this step: a single bad batch that follows a few
    # slightly rising losses is no divergence.
    return rising and tail[-2] > _CLIMB * tail[0]
