"""Detect gradients that were clipped while they were still multiplied by the scale."""

import math
from typing import Any

import torch
from torch import distributed as dist

from buoy._backends.torch.gradients import Gathered, gather
from buoy._backends.torch.reader import AsyncReader

__all__ = ["ClippedWhileScaled"]

_ENOUGH = 3  # checks that must all find the same threshold
_MOST = 16  # checks of one optimizer, including inconclusive ones
_SMALL = 100.0  # scaled gradients below this are suspiciously small
_HIGH = 2.0**10  # ... at scales from here on
_NOT_ROUND = {("norm", 0.0), ("value", 0.0)}


class ClippedWhileScaled:
    """Detects clipping of scaled gradients in an optimizer's first steps; never waits.

    After clipping, the norm or the largest value equals the threshold, which usually
    has one or two digits.  Other changes leave a different number in each step.
    """

    def __init__(self) -> None:
        self.left = _MOST
        self._reader = AsyncReader(every=1)
        self._found: list[set[tuple[str, float]]] = []  # thresholds, per check

    def look(self, optimizer: Any, scale: torch.Tensor, losses: int) -> float | None:
        """Check once more; return the scale once clipping is certain."""
        self.left -= 1
        gathered = None if losses != 1 or _in_ranks() else gather(optimizer)
        if gathered is not None and gathered.grads:
            if not _written_by_hand(gathered):
                self.left = 0
                return None
            self._reader.post(_sizes(gathered.grads, scale))
        for (norm, largest, smallest, value), _ in self._reader.collect():
            if not math.isfinite(norm):
                continue  # an overflow shows no threshold
            self._found.append({("norm", _round(norm)), ("value", _round(largest))})
            same = set.intersection(*self._found) - _NOT_ROUND
            if smallest == largest or value < _HIGH or not same:
                self.left = 0
            elif len(self._found) >= _ENOUGH:
                self.left = 0
                return value
        return None


def _written_by_hand(gathered: Gathered) -> bool:
    """Return whether all gradients were written after backward, not by a hook."""
    return all(
        grad._version and grad._base is None and grad.numel() for grad in gathered.grads
    ) and not any(
        getattr(param, "_post_accumulate_grad_hooks", None) for param in gathered.params
    )


def _sizes(grads: list[torch.Tensor], scale: torch.Tensor) -> torch.Tensor:
    """Return norm, largest and smallest nonzero magnitude, and scale.  float32 [4]."""
    found = []
    for grad in grads:
        size = grad.abs().float()
        smallest = size.masked_fill(size == 0, math.inf).min()
        three = [torch.linalg.vector_norm(size), size.max(), smallest]
        found.append(torch.stack(three).to(scale.device))
    norms, largest, smallest = torch.stack(found).unbind(1)
    norm = torch.linalg.vector_norm(norms)
    return torch.stack([norm, largest.max(), smallest.min(), scale.reshape(())])


def _round(size: float) -> float:
    """Return the size if it is a small number of two digits, else 0."""
    rounded = float(f"{size:.1e}")
    return rounded if size <= _SMALL and abs(size - rounded) <= 2e-5 * size else 0.0


def _in_ranks() -> bool:
    return dist.is_available() and dist.is_initialized()
