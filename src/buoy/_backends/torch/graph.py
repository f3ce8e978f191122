"""The autograd graph behind a loss, and the hooks that run in a backward pass."""

from typing import Any

import torch

__all__ = ["graph_nodes", "graph_of", "hooks_of", "stepped_in_backward"]

# The number of graph nodes that this thread has made: it grows in a forward pass.
graph_nodes = torch._C._autograd._get_sequence_nr

_MAX_NODES = 100_000


def graph_of(loss: torch.Tensor) -> tuple[list[torch.Tensor], set[torch.dtype]]:
    """Return the leaf tensors of a loss's autograd graph, and the dtypes in it.

    Example:
        >>> weight = torch.ones(2, requires_grad=True)
        >>> reached, dtypes = graph_of((weight.half() * 2).sum())
        >>> reached[0] is weight, torch.float16 in dtypes
        (True, True)
    """
    seen: set[Any] = set()
    queue: list[Any] = [loss.grad_fn]
    found: list[torch.Tensor] = []
    dtypes: set[torch.dtype] = set()
    while queue and len(seen) < _MAX_NODES:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            found.append(variable)
        for entry in getattr(node, "_input_metadata", None) or ():
            dtypes.add(entry.dtype)
        queue.extend(following for following, _ in node.next_functions)
    return found, dtypes


def stepped_in_backward(params: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parameters that torch marks so, or that have a `step` as a hook."""
    return [
        param
        for param in params
        if getattr(param, "_in_backward_optimizers", None)
        or any(map(_is_step, hooks_of(param)))
    ]


def _is_step(hook: Any) -> bool:
    of_optimizer = isinstance(getattr(hook, "__self__", None), torch.optim.Optimizer)
    return of_optimizer and "step" in getattr(hook, "__name__", "")


def hooks_of(param: torch.Tensor) -> list[Any]:
    """Return the hooks that run in a backward pass; a `partial` is unwrapped."""
    before = param._backward_hooks or {}
    after = getattr(param, "_post_accumulate_grad_hooks", None) or {}
    return [getattr(f, "func", f) for f in (*before.values(), *after.values())]
