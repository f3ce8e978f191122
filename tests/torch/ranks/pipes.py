"""A network in real FP16, in two stages and in one piece."""

from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from buoy.torch import GradScaler

PARTS, STEPS = 4, 12
mse = nn.functional.mse_loss


class Half(nn.Module):
    """A stage that computes in FP16."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            return self.layers(x).float()


def stages() -> tuple[Half, Half]:
    """Make both, always the same."""
    torch.manual_seed(0)
    return Half(nn.Linear(8, 16), nn.ReLU()), Half(nn.Linear(16, 4))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(step)
    return torch.randn(8, 8, generator=source), torch.randn(8, 4, generator=source)


def scaler_for(policy: str | None = None) -> GradScaler:
    """Start far too high, so that the first steps overflow by themselves."""
    how: Any = {"policy": policy} if policy else {"growth_interval": 3}
    return GradScaler("cpu", 2.0**22, **how)


def staged(kind: str, policy: str | None = None) -> Any:
    """Run one stage, inside a schedule."""
    rank, scaler = dist.get_rank(), scaler_for(policy)
    mine = stages()[rank]
    example = (torch.zeros(2, 8 if rank == 0 else 16),)
    stage = PipelineStage(mine, rank, 2, torch.device("cpu"), example)
    make = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[kind]
    schedule = make(stage, PARTS, loss_fn=scaler.loss_fn(mse))
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
    scales, seen = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(step)
        losses: list[torch.Tensor] = []
        schedule.step(x) if rank == 0 else schedule.step(target=y, losses=losses)
        seen += [loss.item() for loss in losses]
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, seen, [p.detach().clone() for p in mine.parameters()]


def whole() -> Any:
    """Run both in one process, with the same micro-batches."""
    scaler, model = scaler_for(), nn.Sequential(*stages())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scales, seen = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(step)
        for part, target in zip(x.chunk(PARTS), y.chunk(PARTS), strict=True):
            loss = mse(model(part), target)
            seen.append(loss.item())
            scaler.scale(loss).backward()
        for param in model.parameters():
            param.grad.div_(PARTS)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, seen, [p.detach().clone() for p in model.parameters()]


# -- four stages, two on each rank ----------------------------------------------------


def four() -> list[nn.Module]:
    """Make four stages, always the same."""
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]


def looped(kind: str, overflow: bool) -> Any:
    """Run a rank's two stages; with an overflow, the first rank's overflows once."""
    scaler = GradScaler("cpu", 64.0, norm_group=dist.group.WORLD)
    rank, cpu = dist.get_rank(), torch.device("cpu")
    stages = {place: four()[place] for place in (rank, 2 + rank)}
    made = [PipelineStage(stage, place, 4, cpu) for place, stage in stages.items()]
    schedule = {
        "interleaved": ScheduleInterleaved1F1B,
        "zero bubble": ScheduleInterleavedZeroBubble,
    }[kind](made, PARTS, loss_fn=scaler.loss_fn(mse))
    mine = nn.ModuleList(stages.values())
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
    norms = []
    for step in range(4):
        optimizer.zero_grad()
        x, _ = batch(step)
        schedule.step(x) if rank == 0 else schedule.step(target=x.flip(1))
        if overflow and (step, rank) == (1, 0):
            next(mine.parameters()).grad[0, 0] = torch.inf
        norms.append(scaler.clip_grad_norm_(optimizer, 1e9).item())
        scaler.step(optimizer)
        scaler.update()
    weights = {place: [*stages[place].parameters()] for place in stages}
    return norms, scaler.get_scale(), weights


def straight(overflow: bool) -> Any:
    """Run all four in one process, without a scaler; leave out what overflows."""
    stages = four()
    model = nn.Sequential(*stages)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    for step in range(4):
        optimizer.zero_grad()
        x, _ = batch(step)
        mse(model(x), x.flip(1)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1e9).item())
        if not (overflow and step == 1):
            optimizer.step()
    return norms, [[*stage.parameters()] for stage in stages]
