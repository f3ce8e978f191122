"""A tiny FP16 model whose gradients overflow on some batches, and a reference loop."""

from typing import Any

import torch

STEPS = 12
BAD = (3, 7)  # of the batches; their gradients contain an inf
GOOD = [step for step in range(STEPS) if step not in BAD]
WIDTH = 8


class _Overflow(torch.autograd.Function):
    """The identity; its gradient is inf where `bad` is set."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bad: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(bad)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (bad,) = ctx.saved_tensors
        return torch.where(bad.any(), torch.inf, grad), None


class Net(torch.nn.Module):
    """Two layers and a loss; remembers the dtypes that the first layer computed in."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.second = torch.nn.Linear(WIDTH, 1)
        self.dtypes: set[torch.dtype] = set()

    def forward(
        self, x: torch.Tensor, y: torch.Tensor, bad: torch.Tensor, **_: Any
    ) -> dict[str, torch.Tensor]:
        """Return the loss, as Transformers' models do."""
        hidden = self.first(x)
        self.dtypes.add(hidden.dtype)
        out = self.second(torch.tanh(_Overflow.apply(hidden, bad)))
        return {"loss": (out.float().squeeze(-1) - y).square().mean()}


def batch(step: int) -> dict[str, torch.Tensor]:
    """Make the batch of a step: 4 samples."""
    source = torch.Generator().manual_seed(100 + step)
    x = torch.randn(4, WIDTH, generator=source)
    y = torch.randn(4, generator=source)
    return {"x": x, "y": y, "bad": torch.full((4,), step in BAD)}


def samples(steps: int = STEPS) -> list[dict[str, torch.Tensor]]:
    """Return the samples of all batches in order, for a data loader."""
    batches = map(batch, range(steps))
    return [{key: one[key][i] for key in one} for one in batches for i in range(4)]


def adamw(model: torch.nn.Module, *, fused: bool = False) -> torch.optim.Optimizer:
    """Make the optimizer."""
    return torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused)


def decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Make a scheduler that halves the learning rate every second step."""
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def reference(
    steps: list[int] = GOOD,
    *,
    max_norm: float | None = None,
    fused: bool = False,
    scale: float = 2.0**10,
    accumulate: int = 1,
    seed: int = 0,
    decayed: bool = True,
) -> tuple[Net, float]:
    """Train on some batches with a constant scale; return the model and the LR.

    No batch overflows here.
    """
    model = Net(seed)
    optimizer = adamw(model, fused=fused)
    scheduler = decay(optimizer)
    windows = [steps[i : i + accumulate] for i in range(0, len(steps), accumulate)]
    for window in windows:
        optimizer.zero_grad()
        for step in window:
            with torch.autocast("cpu", torch.float16):
                given = {**batch(step), "bad": torch.tensor([False])}
                loss = model(**given)["loss"] / accumulate
            (loss * scale).backward()
        for param in model.parameters():
            param.grad /= scale
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        if decayed:
            scheduler.step()
    return model, scheduler.get_last_lr()[0]


def distance(model: torch.nn.Module, other: torch.nn.Module) -> float:
    """Return the largest difference of two models' weights."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max((a.detach() - b.detach()).abs().max().item() for a, b in pairs)
