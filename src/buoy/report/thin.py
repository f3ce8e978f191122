"""Fewer points, the same picture: what a pixel column spans is kept."""

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

__all__ = ["MOST", "thinned"]

MOST = 1500  # pixel columns, more than a chart is wide


def thinned(
    values: "Sequence[float | None] | npt.NDArray[Any]", most: int = MOST
) -> list[int]:
    """Choose which points to draw: the extremes of every column, the ends, in order.

    Points that were not measured, None or NaN, are left out; infinite ones are never
    the extremes of anything.  Takes a NumPy array, or a list.

    Example:
        >>> thinned([0.0, 5.0, 1.0, None, -3.0, 2.0], most=2)
        [0, 1, 4, 5]
    """
    import numpy as np  # noqa: PLC0415 - comes with Bokeh

    numbers = np.asarray(values, dtype=np.float64)
    known = np.flatnonzero(~np.isnan(numbers))
    if len(known) <= 2 * most:
        return known.tolist()
    numbers = numbers[known]
    infinite = np.isinf(numbers)
    lows = np.where(infinite, math.inf, numbers)
    highs = np.where(infinite, -math.inf, numbers)
    chosen = {0, len(known) - 1}
    width = len(known) / most
    for column in range(most):
        start = math.floor(column * width)
        end = math.floor((column + 1) * width)
        if not infinite[start:end].all():
            chosen.add(start + int(lows[start:end].argmin()))
            chosen.add(start + int(highs[start:end].argmax()))
    return known[sorted(chosen)].tolist()  # type: ignore[no-any-return]
