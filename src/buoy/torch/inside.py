"""Optimizers that step inside the backward pass, before anything has been checked.

They see gradients multiplied by the scale, and an overflow found later in the same pass
would leave some parameters updated and others not.  What is plain to see is refused
before the pass.  For the rest parameters with hooks are compared over the pass: if they
changed they are put back, and `backward()` raises.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

__all__ = ["compare", "hooked", "stepping"]

Held = list[tuple[torch.Tensor, torch.Tensor]]  # a parameter, and a copy of it
Refusal = Callable[[list[torch.Tensor]], Exception]


def hooked(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Find the parameters that somebody else's code is called for in the pass."""
    return [param for param in params if any(map(_foreign, _hooks(param)))]


def _hooks(param: torch.Tensor) -> list[Any]:
    after = getattr(param, "_post_accumulate_grad_hooks", None)
    if not (param._backward_hooks or after):
        return []
    return [*(param._backward_hooks or {}).values(), *(after or {}).values()]


def _foreign(hook: Any) -> bool:
    module = getattr(getattr(hook, "func", hook), "__module__", None) or ""
    return module.split(".", 1)[0] != "buoy"


def compare(loss: torch.Tensor, params: list[torch.Tensor], refusal: Refusal) -> None:
    """Raise from the backward pass of this loss if it changes these parameters."""

    def begin(_: torch.Tensor) -> None:
        held = [(param, param.detach().clone()) for param in params]
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(partial(_end, held, refusal))

    loss.register_hook(begin)  # type: ignore[no-untyped-call]


@torch.no_grad()
def _end(held: Held, refusal: Refusal) -> None:
    moved = [(param, copy) for param, copy in held if _differ(param, copy)]
    for param, copy in moved:
        param.copy_(copy)
    if moved:
        raise refusal([param for param, _ in moved])


def _differ(param: torch.Tensor, copy: torch.Tensor) -> bool:
    """Say whether values changed.  One that was moved away cannot be compared."""
    same = (param.device, param.dtype, param.shape)
    if same != (copy.device, copy.dtype, copy.shape) or torch.equal(param, copy):
        return False
    both_nan = param.isnan() & copy.isnan()
    return bool((param.ne(copy) & ~both_nan).any())


def stepping(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Find the parameters of which it is plain that a hook steps an optimizer."""
    found = []
    for param in params:
        hooks = getattr(param, "_post_accumulate_grad_hooks", None) or {}
        plain = any(map(_steps, hooks.values()))
        if plain or getattr(param, "_in_backward_optimizers", None):
            found.append(param)
    return found


def _steps(hook: Any) -> bool:
    """Say whether a hook holds an optimizer's `step`, or an optimizer and says `step`.

    What an object reaches through its attributes does not count: who logs
    `self.step` may well have an optimizer, too.
    """
    if _is_step(hook):
        return True
    code = getattr(getattr(hook, "func", hook), "__code__", None)
    says = code is not None and "step" in code.co_names
    return any(
        _is_step(part) or (says and isinstance(part, Optimizer))
        for part in _one_deep(_held_by(hook))
    )


def _is_step(thing: Any) -> bool:
    owner = getattr(thing, "__self__", None)
    return isinstance(owner, Optimizer) and "step" in getattr(thing, "__name__", "")


def _one_deep(things: Iterable[Any]) -> Iterator[Any]:
    for thing in things:
        yield thing
        if isinstance(thing, dict):
            yield from list(thing.values())[:64]
        elif isinstance(thing, (list, tuple)):
            yield from thing[:64]


def _held_by(hook: Any) -> Iterator[Any]:
    """Go through what a function, or a partial of one, was made with."""
    function = getattr(hook, "func", hook)
    yield function
    yield from getattr(hook, "args", ())
    yield from getattr(hook, "keywords", {}).values()
    yield from getattr(function, "__defaults__", None) or ()
    yield from (getattr(function, "__kwdefaults__", None) or {}).values()
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # an empty cell
            continue
    names = getattr(function, "__globals__", {})
    code = getattr(function, "__code__", None)
    yield from (names[name] for name in getattr(code, "co_names", ()) if name in names)
