"""Know gradients again: have others been computed since they were looked at?"""

import weakref
from functools import partial
from typing import Any

import torch
from torch import distributed as dist

from buoy.torch.gather import owners, parameters_of

__all__ = ["Look", "Mark", "first_of", "still_there"]

Mark = list[tuple[weakref.ref[torch.Tensor], int]]  # of one gradient, or of none


class Look:
    """A look at an optimizer's gradients; what a later backward pass makes is other.

    What is changed by hand belongs to whoever does it.  It costs nothing unless another
    loss is scaled before the step: then hooks wait for a backward pass to come by.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._handles: list[Any] = []
        self._known: list[tuple[torch.Tensor, int]] | None = None
        self.touched = False

    def expect_another(self) -> None:
        """Be told that another loss has been scaled."""
        if self._handles:
            return
        notice: Any = partial(_notice, weakref.ref(self))
        self._handles = [
            param.register_post_accumulate_grad_hook(notice)  # type: ignore[no-untyped-call]
            for param in parameters_of(self._optimizer)
            if param.requires_grad and param.is_leaf
        ]
        if dist.is_available() and dist.is_initialized():
            # Sharded gradients are set by hand, past all hooks.
            self._known = [(p, id(p.grad)) for p in owners(self._optimizer)]

    def outdated(self) -> bool:
        """Say whether other gradients lie there now."""
        replaced = (id(param.grad) != known for param, known in self._known or ())
        return self.touched or any(replaced)

    def __del__(self) -> None:
        for handle in self._handles:
            handle.remove()


def _notice(look: "weakref.ref[Look]", _: torch.Tensor) -> None:
    held = look()
    if held is not None:
        held.touched = True


def first_of(optimizer: Any) -> Mark:
    """Remember the first gradient only: whoever computes others touches it as well."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if (grad := param.grad) is not None:
                return [(weakref.ref(grad), grad._version)]
    return []


def still_there(optimizer: Any, known: Mark) -> bool:
    """Say whether that one is the first still, as it was."""
    now = first_of(optimizer)
    if not (now and known):
        return False
    (reference, version), (old, before) = now[0], known[0]
    return reference() is old() and version == before
