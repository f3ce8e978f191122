"""Which group's loss a gradient came from, so that scales are never mixed unnoticed.

Looked at in the first iterations only: the loss's graph says which parameters it
reaches, a hook on the loss says when its backward pass begins.
"""

from typing import Any

import torch

from buoy.torch import holes

__all__ = ["Origins"]

_PROBES = 3  # losses of each group whose graph is walked


class Origins:
    """For each parameter the groups that have added to its gradient."""

    def __init__(self) -> None:
        self._left: dict[str, int] = {}
        self._from: dict[int, set[str]] = {}

    def follow(self, name: str, loss: torch.Tensor, *, may_read: bool) -> None:
        """Take note when this loss's backward pass begins."""
        left = self._left.get(name, _PROBES)
        self._left[name] = left - 1
        if left <= 0:
            self._from.clear()  # whom this loss reaches is not known any more
        if left <= 0 or not loss.requires_grad:
            return
        reached, _ = holes.leaves(loss)

        def begin(grad: torch.Tensor) -> None:
            del grad
            for param in reached:
                kept = may_read and _holds_something(param)
                before = self._from.get(id(param), set()) if kept else set()
                self._from[id(param)] = before | {name}

        loss.register_hook(begin)  # type: ignore[no-untyped-call]

    def of(self, params: list[torch.Tensor]) -> set[str]:
        """Name the groups that these gradients came from, as far as known."""
        found: set[str] = set()
        for param in params:
            found |= self._from.get(id(param), set())
        return found


def _holds_something(param: Any) -> bool:
    grad = param.grad
    return grad is not None and bool((grad != 0).any())
