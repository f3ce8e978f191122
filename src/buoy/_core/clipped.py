"""Tell gradients that were clipped while they were multiplied by the scale.

Clipping makes one number of many: the norm, or the largest value, becomes the
threshold, whatever it was before.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

__all__ = ["ENOUGH", "SeenScaled", "find_threshold", "is_threshold"]

ENOUGH = 3  # looks that find the same threshold
_EXACT = 2e-5  # a threshold's relative error, where gradients are float32
_EPSILON = 1e-6  # that clipping functions add to the norm
_VARIES = 16.0  # such errors, by which gradients differ that are not the same ones
_LARGEST = 0.01  # error that is tolerated
_COUNT = 2048.0  # by which gradients are averaged
_ROWS = 8  # recorded steps with one norm
_SHARE = 0.1  # of the steps with any norm
_ALL_ROWS = 20  # the same two where the scale never changed
_ALL = 0.9
_LEAST = 2.0**-10  # FP16 rounds smaller sizes to a few numbers


class SeenScaled(NamedTuple):
    """Scaled gradients before `step`, and at the end of the backward pass; 0: unknown.

    Norms and largest values are rounded to float32.
    """

    norm: float
    largest: float
    norm_before: float
    largest_before: float
    scale: float
    error: float  # of the dtype


def is_threshold(every: Sequence[SeenScaled], kind: int) -> bool:
    """Return whether the last size is a threshold.  `kind` 0: norm; 1: largest value.

    It is if several looks find this number, smaller than it was before, at several
    scales.  At a single scale it must also be round, and must not be a usual threshold
    that was multiplied by the scale, or constant gradients divided by a number.
    """
    last = every[-1]
    size = last[kind]
    error = max(_error(one, kind) for one in every)
    same = [one for one in every if _is_near(one[kind], size, error)]
    if size == 0.0 or len(same) < ENOUGH:
        return False
    before = [one[kind + 2] for one in same if one[kind + 2] > 0.0]
    scales = [one.scale for one in same]
    digits = 1 if last.error else 2
    margin = 1.0 + _VARIES * error
    moved = max(scales) > margin * min(scales)
    if not before:  # no backward pass was seen, and nothing else is known
        return moved and _is_round(size, digits, error)
    if len(before) < ENOUGH - 1 or min(before) <= margin * size:
        return False
    varies = max(before) > margin * min(before)
    if moved and varies:
        return True
    if not _is_round(size, digits, error) or _is_usual(size / last.scale, error):
        return False
    return varies or not _is_plain(before[-1] / size, error)


def _error(seen: SeenScaled, kind: int) -> float:
    """Return how far, relative to it, a threshold may be from the size that is left."""
    size = max(seen[kind], seen[kind + 2])
    epsilon = _EPSILON / size if kind == 0 and size > 0.0 else 0.0
    return min(_EXACT + epsilon + seen.error, _LARGEST)


def _is_usual(size: float, error: float) -> bool:
    """Return whether this is a usual threshold: 1.0, 0.2, 2.5, but not 0.016."""
    halves = _is_round(size, 2, error) and f"{size:.1e}"[2] == "5"
    return halves or _is_round(size, 1, error)


def _is_plain(ratio: float, error: float) -> bool:
    """Return whether gradients may be divided by it: a count, 2^k, 1 / 0.1."""
    whole = ratio <= _COUNT and _is_near(ratio, round(ratio), error)
    power = _is_near(ratio, 2.0 ** round(math.log2(ratio)), error)
    return whole or power or _is_round(1.0 / ratio, 2, error)


def _is_round(size: float, digits: int, error: float) -> bool:
    return _is_near(size, float(f"{size:.{digits - 1}e}"), error)


def _is_near(size: float, other: float, error: float) -> bool:
    return abs(size - other) <= error * other


# -- from recorded steps ---------------------------------------------------------------


def find_threshold(
    sizes: Sequence[float], scales: Sequence[float], *, one_scale: bool
) -> tuple[float, bool] | None:
    """Return the threshold that scaled gradients have in many steps, if there is one.

    `sizes` are those of unscaled gradients, `scales` those of the same steps.  The
    bool says whether it is certain: then the size is the same at several scales.  At
    one scale, if `one_scale`, a round number in nearly all steps may be one.

    Example:
        >>> scales = [2.0**16] * 10 + [2.0**17] * 10
        >>> find_threshold([1.0 / x for x in scales], scales, one_scale=False)
        (1.0, True)
        >>> find_threshold([0.25] * 20, scales, one_scale=False)
    """
    every = sorted((a * b, b) for a, b in zip(sizes, scales, strict=True))
    scaled = [size for size, _ in every]
    best = (0, 0)
    start = 0
    for end, size in enumerate(scaled, 1):
        while scaled[start] < size * (1.0 - 2.0 * _EXACT):
            start += 1
        best = max(best, (end - start, -start))
    count = best[0]
    start = -best[1]
    if count < _ROWS or count < _SHARE * len(every):
        return None
    size = scaled[start + count // 2]
    at = sorted(scale for _, scale in every[start : start + count])
    if not math.isfinite(size) or size < _LEAST:
        return None
    often = [a for a, b in pairwise(at) if a == b]  # scales of several steps
    if often and often[-1] > (1.0 + _VARIES * _EXACT) * often[0]:
        return size, True
    known = not one_scale or count < max(_ALL_ROWS, _ALL * len(every))
    if known or not _is_round(size, 2, _EXACT) or _is_usual(size / at[0], _EXACT):
        return None
    return size, False
