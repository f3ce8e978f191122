"""Small networks and loops that the tests share."""

from collections.abc import Callable
from typing import Any

import torch

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "fused sgd": lambda params: torch.optim.SGD(params, lr=0.05, fused=True),
    "fused momentum": lambda params: torch.optim.SGD(
        params, lr=0.05, momentum=0.9, fused=True
    ),
    "fused adam": lambda params: torch.optim.Adam(params, lr=0.01, fused=True),
    "fused adamw": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "fused adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01, fused=True),
}


def net(seed: int = 0) -> torch.nn.Sequential:
    """Make a small network, the same for the same seed."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
    )


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the batch of a step, the same for the same step."""
    source = torch.Generator().manual_seed(1000 + step)
    return (
        torch.randn(5, 6, generator=source),
        torch.randn(5, 3, generator=source),
    )


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    """Compute the loss of a step's batch."""
    x, y = batch(step)
    return torch.nn.functional.mse_loss(model(x), y)


def spoil(model: torch.nn.Module, event: str, which: int = -1) -> None:
    """Write an inf or a NaN into one gradient."""
    if event != "ok":
        params = [p for p in model.parameters() if p.grad is not None]
        params[which].grad.view(-1)[0] = float(event)


def train(
    scaler: Any,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    events: list[str],
    *,
    start: int = 0,
    before_step: Callable[[], None] = lambda: None,
) -> list[tuple[float, int]]:
    """Run one step per event; return the scale and the counter after each."""
    seen = []
    for step, event in enumerate(events, start):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        spoil(model, event)
        before_step()
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.get_scale(), scaler._get_growth_tracker()))
    return seen
