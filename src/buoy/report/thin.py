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
    numbers = [value for value in values if value is not None]
    chosen = {known[0], known[-1]}
    width = len(known) / most
    for column in range(most):
        start, end = math.floor(column * width), math.floor((column + 1) * width)
        part = numbers[start:end]
        fine = part
        if not math.isfinite(sum(part)):
            fine = [value for value in part if math.isfinite(value)]
        if fine:
            chosen.add(known[start + part.index(min(fine))])
            chosen.add(known[start + part.index(max(fine))])
    return sorted(chosen)
