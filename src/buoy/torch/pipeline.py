"""Scaling inside a pipeline's schedule, which calls the loss and `backward` itself."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from buoy.torch.scaler import GradScaler

__all__ = ["scaled_loss"]


class _Scaled(torch.autograd.Function):
    """Leave a loss as it is, and multiply the gradients that flow out of it."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(scale)
        return loss.clone()  # zero-bubble schedules detach it in place: no view

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (scale,) = ctx.saved_tensors
        return grad * scale, None


def scaled_loss(
    scaler: "GradScaler", function: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """Wrap a loss function: the same losses, gradients multiplied by the scale."""

    def loss_fn(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss = function(*args, **kwargs)
        scale = scaler._met(loss)
        applied: torch.Tensor = _Scaled.apply(loss, scale)  # type: ignore[no-untyped-call]
        return applied

    return loss_fn
