"""The log of the last steps, as front ends keep it on a device: a ring of rows.

Step i is in row i modulo the length.  A row has the numbers of `COLUMNS`; beside it
stand flags, one per gradient, that say which were not finite.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from buoy._core.ops import Scalar
from buoy._core.step import Row
from buoy._core.verdicts import HISTORY, Verdict, judge_losses

__all__ = ["COLUMNS", "LENGTH", "NOT_MEASURED", "Measured", "line_of", "rows_of"]

# What was not measured has a flag: NaN in its place would trip `jax_debug_nans`.
_MEASURED = ("norm", "amax", "loss")
COLUMNS = (
    "scale",
    "next_scale",
    "applied",
    *_MEASURED,
    *(f"has_{name}" for name in _MEASURED),
)
LENGTH = 2 * HISTORY  # steps that a log keeps


class Measured(NamedTuple):
    """A number on a device, and whether it was measured in this step."""

    number: Scalar  # float32 []
    known: Scalar = True  # bool []


NOT_MEASURED = Measured(0.0, False)


def line_of(
    scale: Scalar,
    next_scale: Scalar,
    applied: Scalar,
    *,
    norm: Measured = NOT_MEASURED,
    amax: Measured = NOT_MEASURED,
    loss: Measured = NOT_MEASURED,
) -> tuple[Scalar, ...]:
    """Return the numbers of `COLUMNS` for one step.

    Example:
        >>> line_of(8.0, 4.0, False, loss=Measured(0.5))
        (8.0, 4.0, False, 0.0, 0.0, 0.5, False, False, True)
    """
    measured = (norm, amax, loss)
    numbers = [one.number for one in measured]
    flags = [one.known for one in measured]
    return (scale, next_scale, applied, *numbers, *flags)


def rows_of(
    steps: int, ring: Sequence[Any], bad: Sequence[Any], names: Sequence[str]
) -> list[Row]:
    """Return the steps that a ring holds, oldest first.

    `steps` is the number of steps so far, `ring` and `bad` are read to the host, and
    `names` has the names of the gradients.  A skip is judged by the losses of the
    applied steps before it: those of other skipped steps are not usual losses.

    Example:
        >>> line = line_of(8.0, 4.0, False, loss=Measured(0.5))
        >>> (row,) = rows_of(1, [line], [[True]], ["w"])
        >>> row.verdict.value, row.norm, row.loss, row.offenders
        ('scale_too_high', None, 0.5, ('w',))
    """
    length = len(ring)
    read: list[Row] = []
    losses: list[float] = []  # of the applied steps
    for step in range(max(0, steps - length), steps):
        found = dict(zip(COLUMNS, map(float, ring[step % length]), strict=True))
        measured = {
            name: found[name] if found[f"has_{name}"] else None for name in _MEASURED
        }
        loss = measured["loss"]
        now = [] if loss is None else [loss]
        applied = found["applied"] == 1.0
        if applied:
            verdict = Verdict.APPLIED
            losses += now
        else:
            verdict = judge_losses(now, losses[-HISTORY:])
        flags = zip(names, bad[step % length], strict=True)
        read.append(
            Row(
                step=step,
                scale=found["scale"],
                next_scale=found["next_scale"],
                applied=applied,
                verdict=verdict,
                norm=measured["norm"],
                amax=measured["amax"],
                loss=loss,
                offenders=tuple(name for name, flag in flags if flag),
            )
        )
    return read
