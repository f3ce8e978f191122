"""A hole in what stands behind a scaler, and its plug; and the graph of a loss.

Torch's fused SGD makes its momentum buffers of uninitialised memory and leaves them so
when its first step overflows; the second step then destroys the weights.
"""

from typing import Any

import torch

__all__ = ["fill_momentum", "leaves", "open_in"]

_MAX_NODES = 100_000


def open_in(optimizers: tuple[Any, ...]) -> bool:
    """Say whether one of these has a hole: the kernels of all but SGD are sound."""
    return any(isinstance(one, torch.optim.SGD) for one in optimizers)


def fill_momentum(optimizer: Any) -> None:
    """Give a fused SGD zeros for momentum before its first step.

    From zeros its first step makes the same buffer as from nothing, as long as
    `dampening` is 0; `dampened` steps the others.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        plain = group.get("momentum") and not group["dampening"]
        for param in group["params"] if plain and group.get("fused") else ():
            grad, state = param.grad, optimizer.state[param]
            if grad is not None and state.get("momentum_buffer") is None:
                zeros = torch.zeros_like(grad, memory_format=torch.preserve_format)
                state["momentum_buffer"] = zeros


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
