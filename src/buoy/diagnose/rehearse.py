"""Run a step's forward and backward pass again, without side effects.

Gradients, buffers, random numbers and scalers are afterwards what they were before.
A step function may go on to unscale, clip, step or update: it is stopped there, so a
whole training step can be given as it stands.
"""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeGuard, TypeVar

import torch
from torch.amp.grad_scaler import GradScaler as TorchGradScaler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from buoy._backends.torch.losses import map_nested

__all__ = [
    "Rehearsed",
    "RngState",
    "StepFn",
    "kept_aside",
    "rehearse",
    "rng_state",
    "set_rng_state",
    "with_subclasses",
]

T = TypeVar("T")
StepFn = Callable[[], object]
RngState = dict[str, Any]  # by the source of random numbers, each in its own form

_AFTER = ("unscale_", "step", "update", "clip_grad_norm_", "clip_grad_value_")


class _Over(BaseException):
    """The passes are done: what follows would change something."""


def rehearse(step_fn: StepFn, *, scale: float | None = None) -> "Rehearsed":
    """Run the passes of a step; return the losses, unscaled, and the scale.

    Losses are multiplied by `scale`, or by their scaler's own.  A loss that `step_fn`
    returns without having run backward through it, is; if it is no number that has a
    graph, no backward pass is run.
    """
    seen = Rehearsed(scale)
    # Compiled modules would run past the hooks.
    with _scalers_at_rest(seen, scale), torch.compiler.set_stance("force_eager"):
        try:
            returned = step_fn()
        except _Over:
            returned = None
        if isinstance(returned, torch.Tensor) and not seen.losses:
            seen.losses.append(returned.detach())
        if _is_loss(returned) and not seen.backward:
            factor = torch.full((), scale or 1.0, device=returned.device)
            (returned * factor).backward()  # type: ignore[no-untyped-call]
    return seen


def _is_loss(returned: object) -> TypeGuard[torch.Tensor]:
    if not isinstance(returned, torch.Tensor):
        return False
    return returned.numel() == 1 and returned.requires_grad


@dataclass(slots=True)
class Rehearsed:
    """The findings of a rehearsal."""

    scale: float | None
    losses: list[torch.Tensor] = field(default_factory=list)
    backward: bool = False  # whether the step ran backward itself


@contextmanager
def _scalers_at_rest(seen: Rehearsed, scale: float | None) -> Iterator[None]:
    """Let every scaler multiply and do nothing else, and no optimizer step."""

    def multiply(self: TorchGradScaler, outputs: Any) -> Any:
        if not isinstance(outputs, torch.Tensor):
            return map_nested(self.scale, outputs)
        seen.losses.append(outputs.detach())
        if not self.is_enabled():
            return outputs
        seen.scale = self.get_scale() if scale is None else scale
        return outputs * torch.full((), seen.scale, device=outputs.device)

    def run(_: TorchGradScaler, step_fn: StepFn, *__: object, **___: object) -> object:
        return step_fn()

    def backward(*args: Any, **kwargs: Any) -> None:
        seen.backward = True
        original(*args, **kwargs)

    original = torch.autograd.backward
    replacements: dict[str, Callable[..., object]] = {
        "scale": multiply,
        "run": run,
        **dict.fromkeys(_AFTER, _over),
    }
    with ExitStack() as stack:
        for kind in _scalers():
            for name, replacement in replacements.items():
                if name in vars(kind):
                    stack.callback(setattr, kind, name, vars(kind)[name])
                    setattr(kind, name, replacement)
        stack.callback(setattr, torch.autograd, "backward", original)
        torch.autograd.backward = backward
        stack.callback(register_optimizer_step_pre_hook(_over).remove)
        yield


def _over(*_: object, **__: object) -> None:
    raise _Over


def _scalers() -> list[type[TorchGradScaler]]:
    """List the classes whose methods are torch's or ours, not a user's."""
    kinds = with_subclasses(TorchGradScaler)
    return [k for k in kinds if k.__module__.split(".")[0] in ("torch", "buoy")]


def with_subclasses(root: type[T]) -> list[type[T]]:
    """List a class and all that derive from it, each once."""
    found = {root: None}  # a dict keeps the order
    for kind in root.__subclasses__():
        found.update(dict.fromkeys(with_subclasses(kind)))
    return list(found)


# -- what a rehearsal must not change -------------------------------------------------


@contextmanager
def kept_aside(model: torch.nn.Module, rng: RngState | None = None) -> Iterator[None]:
    """Put gradients, buffers and random numbers aside, and back in the end."""
    now = rng_state()
    grads = [(param, param.grad) for param in model.parameters()]
    # DDP may keep gradients in the very memory that the next backward pass writes to.
    shared = [g for _, g in grads if g is not None and g._base is not None]
    overwritten = [*model.buffers(), *shared]
    copies = [(tensor, tensor.detach().clone()) for tensor in overwritten]
    places = [
        (module, name, value)
        for module in model.modules()
        for name, value in module._buffers.items()
    ]

    for param, _ in grads:
        param.grad = None
    if rng is not None:
        set_rng_state(rng)
    try:
        yield
    finally:
        for param, grad in grads:
            param.grad = grad
        for module, name, value in places:
            module._buffers[name] = value
        with torch.no_grad():
            for tensor, before in copies:
                tensor.copy_(before)
        set_rng_state(now)


def rng_state() -> RngState:
    """Return the state of every random generator in use.

    Example:
        >>> before = rng_state()
        >>> first = torch.rand(())
        >>> set_rng_state(before)
        >>> bool(torch.rand(()) == first)
        True
    """
    state: RngState = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy.random" in sys.modules:
        state["numpy"] = sys.modules["numpy.random"].get_state()
    return state


def set_rng_state(state: RngState) -> None:
    """Go back to a state taken down before."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])
    if "numpy" in state and "numpy.random" in sys.modules:
        sys.modules["numpy.random"].set_state(state["numpy"])
