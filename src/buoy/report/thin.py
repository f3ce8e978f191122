"""Fewer points, the same picture: what a pixel column spans is kept."""

import math
from collections.abc import Sequence

__all__ = ["MOST", "thinned"]

MOST = 1500  # pixel columns, more than a chart is wide


def thinned(values: Sequence[float | None], most: int = MOST) -> list[int]:
    """Choose which points to draw: the extremes of every column, the ends, in order.

    Points that were not measured are left out; those that are not finite are never
    the extremes of anything.

    Example:
        >>> thinned([0.0, 5.0, 1.0, None, -3.0, 2.0], most=2)
        [0, 1, 4, 5]
    """
    known = [i for i, value in enumerate(values) if value is not None]
    if len(known) <= 2 * most:
        return known
    chosen = {known[0], known[-1]}
    width = len(known) / most
    for column in range(most):
        part = known[math.floor(column * width) : math.floor((column + 1) * width)]
        fine = [i for i in part if math.isfinite(values[i] or 0.0)]
        if fine:
            chosen.add(min(fine, key=lambda i: values[i] or 0.0))
            chosen.add(max(fine, key=lambda i: values[i] or 0.0))
    return sorted(chosen)
