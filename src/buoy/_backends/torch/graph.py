"""The autograd graph behind a loss."""

from typing import Any

import torch

__all__ = ["graph_of"]

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
