"""Nested losses, and losses whose gradient is scaled but not their value."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from buoy._core.errors import OptionError

__all__ = ["map_nested", "scale_gradient"]


def map_nested(function: Callable[[torch.Tensor], torch.Tensor], outputs: Any) -> Any:
    """Apply a function to the tensors in lists, tuples and other iterables."""
    if isinstance(outputs, torch.Tensor):
        return function(outputs)
    if isinstance(outputs, (str, bytes, dict)) or not isinstance(outputs, Iterable):
        message = (
            "outputs must be a Tensor or an iterable of Tensors, got "
            f"{type(outputs).__name__} {outputs!r:.60}. A number has no graph to run "
            "backward through: pass the loss itself, not `loss.item()`; of a dict pass "
            "the values that are losses."
        )
        raise OptionError(message)
    if isinstance(outputs, (list, tuple)):
        parts = [map_nested(function, part) for part in outputs]
        kind: Any = type(outputs)
        return kind._make(parts) if hasattr(kind, "_make") else kind(parts)
    return (map_nested(function, part) for part in outputs)


class _ScaledGradient(torch.autograd.Function):
    """Identity in the forward pass; multiplies the gradient in the backward pass."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(scale)
        return loss.clone()  # not a view: zero-bubble schedules detach it in place

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (scale,) = ctx.saved_tensors
        return grad * scale, None


def scale_gradient(loss: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the same loss; its gradients are multiplied by the scale."""
    scaled: torch.Tensor = _ScaledGradient.apply(loss, scale)  # type: ignore[no-untyped-call]
    return scaled
