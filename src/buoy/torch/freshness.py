"""Notice gradients that were computed after an optimizer's were inspected."""

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import distributed as dist

from buoy._backends.torch.gradients import Gathered, parameters_of, same_parameters
from buoy._backends.torch.graph import graph_nodes

__all__ = ["FirstGradient", "Freshness"]

FirstGradient = tuple["weakref.ref[torch.Tensor]", int]  # one gradient, its version


class Freshness:
    """Detects gradients that were computed after an optimizer's were inspected.

    A further backward pass, or a parameter that has a gradient now and had none, is a
    change.  Writing to `.grad` by hand is not.  Hooks on the parameters are registered
    only if another loss is scaled before the step.
    """

    # Class attributes as defaults: one instance is made in every step.
    touched = False  # a hook was called
    _handles: Sequence[Any] = ()
    _grads: Sequence[tuple[torch.Tensor, int]] = ()

    def __init__(self, optimizer: Any, gathered: Gathered | None) -> None:
        self._optimizer = optimizer
        self._params = None if gathered is None else gathered.params
        self._nodes = graph_nodes()

    def expect_backward(self) -> None:
        """Register hooks that detect a backward pass: another loss was scaled."""
        if self._handles:
            return
        notice: Any = partial(_notice, weakref.ref(self))
        params = parameters_of(self._optimizer)
        self._handles = [
            param.register_post_accumulate_grad_hook(notice)  # type: ignore[no-untyped-call]
            for param in params
            if param.requires_grad and param.is_leaf
        ]
        weakref.finalize(self, _remove, self._handles).atexit = False
        if dist.is_available() and dist.is_initialized():
            # Sharded gradients are assigned without calling hooks.
            self._grads = [(p, id(p.grad)) for p in params if p.grad is not None]

    def outdated(self) -> bool:
        """Return whether there are gradients that were not inspected."""
        if self.touched or any(id(param.grad) != known for param, known in self._grads):
            return True
        known = self._params
        return known is not None and not same_parameters(self._optimizer, known)

    def may_be_outdated(self) -> bool:
        """Return whether a loss that was not scaled may have added to the gradients."""
        return self._nodes != graph_nodes()


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()


def _notice(freshness: "weakref.ref[Freshness]", _: torch.Tensor) -> None:
    held = freshness()
    if held is not None:
        held.touched = True
