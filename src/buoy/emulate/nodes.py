"""Which nodes of autograd's graph were made by operators that are kept in FP32.

Nodes are numbered as they are made, on each thread; an operator's node is made before
the operator runs.  So the numbers between two operators belong to the second one.
"""

from bisect import bisect_right
from collections.abc import Callable

import torch
from torch.autograd.graph import Node

__all__ = ["KeptNodes", "is_leaf", "made", "now"]

now: Callable[[], Node | None] = torch._C._current_autograd_node
made: Callable[[], int] = torch._C._autograd._get_sequence_nr

_LEAF = 2**64 - 1
_MOST = 4096  # stretches that are remembered: graphs are not kept for that long


def is_leaf(node: Node) -> bool:
    """Return whether a node is one that collects a parameter's gradient."""
    return bool(node._sequence_nr() == _LEAF)


class KeptNodes:
    """Stretches of numbers.

    Example:
        >>> kept = KeptNodes()
        >>> kept.add(3, 5)
        >>> [number for number in range(7) if number in kept]
        [3, 4]
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start: int, end: int) -> None:
        """Add the numbers from `start` up to `end`, which is not one of them."""
        if start >= end:
            return
        if self._ends and self._ends[-1] >= start:
            self._ends[-1] = end
            return
        self._starts.append(start)
        self._ends.append(end)
        if len(self._starts) > 2 * _MOST:
            del self._starts[:_MOST], self._ends[:_MOST]

    def __contains__(self, number: int) -> bool:
        place = bisect_right(self._starts, number) - 1
        return place >= 0 and number < self._ends[place]
