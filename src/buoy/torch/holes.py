"""A hole in what stands behind a scaler, and its plug; and the graph of a loss.

Torch's fused SGD makes its momentum buffers of uninitialised memory and leaves them so
when its first step overflows; the second step then destroys the weights.
"""

from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["fill_momentum", "leaves", "unplugged_momentum"]

_MAX_NODES = 100_000


def fill_momentum(optimizer: Any) -> None:
    """Give a fused SGD zeros for momentum before its first step.

    From zeros its first step makes the same buffer as from nothing, as long as
    `dampening` is 0; `unplugged_momentum` tells of the others.
    """
    for param, group in _without_momentum(optimizer):
        if not group["dampening"] and param.grad is not None:
            buffer = torch.zeros_like(param.grad, memory_format=torch.preserve_format)
            optimizer.state[param]["momentum_buffer"] = buffer


def unplugged_momentum(optimizer: Any) -> bool:
    """Say whether a fused SGD's first step must not be tried with an overflow."""
    return any(True for _ in _without_momentum(optimizer))


def _without_momentum(optimizer: Any) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        if not group.get("fused") or not group.get("momentum"):
            continue
        for param in group["params"]:
            if param.grad is None:
                continue
            if optimizer.state[param].get("momentum_buffer") is None:
                yield param, group


def leaves(loss: torch.Tensor) -> tuple[list[torch.Tensor], set[torch.dtype]]:
    """Walk a loss's graph: the parameters it reaches, the dtypes on the way."""
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
