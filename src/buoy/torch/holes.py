"""Holes in what stands behind a scaler, and their plugs.

* torch's fused SGD makes its momentum buffers of uninitialised memory and leaves them
  so when its first step overflows; the second step then destroys the weights.
* An optimizer that steps in a hook of the backward pass updates some parameters before
  the overflow of another is known.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

__all__ = ["fill_momentum", "leaves", "stepping", "unplugged_momentum"]

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


def stepping(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Find the parameters whose gradient hooks call an optimizer."""
    found = []
    for param in params:
        if getattr(param, "_in_backward_optimizers", None):
            found.append(param)
            continue
        hooks = getattr(param, "_post_accumulate_grad_hooks", None)
        if hooks and any(_steps(hook) for hook in hooks.values()):
            found.append(param)
    return found


def _steps(hook: Any) -> bool:
    function = getattr(hook, "func", hook)
    code = getattr(function, "__code__", None)
    if code is None:  # an object that is called
        code = getattr(type(function).__call__, "__code__", None)
    return (code is None or "step" in code.co_names) and _reaches_optimizer(hook, 3)


def _reaches_optimizer(thing: Any, depth: int) -> bool:
    if isinstance(thing, torch.optim.Optimizer):
        return True
    if depth == 0:
        return False
    return any(_reaches_optimizer(part, depth - 1) for part in _parts(thing))


def _parts(thing: Any) -> Iterator[Any]:
    if isinstance(thing, dict):
        yield from list(thing.values())[:64]
        return
    if isinstance(thing, (list, tuple, set)):
        yield from list(thing)[:64]
        return
    for owner in (thing, getattr(thing, "__self__", None)):
        yield owner if owner is not thing else None
        yield from list(getattr(owner, "__dict__", {}).values())[:64]
    yield getattr(thing, "func", None)
    yield getattr(thing, "args", None)
    for cell in getattr(thing, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # an empty cell
            continue
    code = getattr(thing, "__code__", None)
    if code is not None:
        names = getattr(thing, "__globals__", {})
        yield from (names[name] for name in code.co_names if name in names)
