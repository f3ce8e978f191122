"""The log of the last steps, as front ends keep it on a device: a ring of rows.

Step i is in row i modulo the length.  A row has the numbers of `COLUMNS`; beside it
stand flags, one per gradient, that say which were not finite.
"""

from collections.abc import Sequence
from typing import Any

from buoy._core.step import Row
from buoy._core.verdicts import HISTORY, Verdict, judge_losses

__all__ = ["COLUMNS", "LENGTH", "UNKNOWN", "rows_of"]

COLUMNS = ("scale", "next_scale", "applied", "norm", "amax", "loss", "has_loss")
LENGTH = 2 * HISTORY  # steps that a log keeps
# Sizes are never negative, so -1 marks "not measured"; NaN would trip `jax_debug_nans`.
UNKNOWN = -1.0


def rows_of(
    steps: int, ring: Sequence[Any], bad: Sequence[Any], names: Sequence[str]
) -> list[Row]:
    """Return the steps that a ring holds, oldest first.

    `steps` is the number of steps so far, `ring` and `bad` are read to the host, and
    `names` has the names of the gradients.  A skip is judged by the losses of the
    applied steps before it: those of other skipped steps are not usual losses.

    Example:
        >>> rows_of(1, [(8.0, 4.0, 0.0, -1.0, -1.0, 0.5, 1.0)], [[True]], ["w"])
        [Row(step=0, scale=8.0, next_scale=4.0, applied=False, \
verdict=<Verdict.SCALE_TOO_HIGH: 'scale_too_high'>, norm=None, amax=None, loss=0.5, \
offenders=('w',))]
    """
    length = len(ring)
    read: list[Row] = []
    losses: list[float] = []
    for step in range(max(0, steps - length), steps):
        row = dict(zip(COLUMNS, map(float, ring[step % length]), strict=True))
        applied, loss = row["applied"] == 1.0, row["loss"] if row["has_loss"] else None
        now, before = [] if loss is None else [loss], losses[-HISTORY:]
        if applied:
            losses += now
        flags = zip(names, bad[step % length], strict=True)
        read.append(
            Row(
                step=step,
                scale=row["scale"],
                next_scale=row["next_scale"],
                applied=applied,
                verdict=Verdict.APPLIED if applied else judge_losses(now, before),
                norm=_known(row["norm"]),
                amax=_known(row["amax"]),
                loss=loss,
                offenders=tuple(name for name, flag in flags if flag),
            )
        )
    return read


def _known(number: float) -> float | None:
    return None if number < 0.0 else number
