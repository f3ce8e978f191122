"""What crews are asked to do: clip gradients that are still multiplied by the scale."""

import warnings
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from buoy._backends import torch as backend
from buoy.torch import GradScaler


def train(
    policy: str | None, parallel: str, who: str, hidden: bool
) -> tuple[list[int], list[float]]:
    """Return the steps in which this rank is told, and the scales."""
    seen = backend.in_host_memory
    if hidden:
        backend.in_host_memory = lambda tensor: False
    try:
        return _train(policy, parallel, who, sync="never" if hidden else "auto")
    finally:
        backend.in_host_memory = seen


def _train(
    policy: str | None, parallel: str, who: str, sync: Any
) -> tuple[list[int], list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    whole: Any = model
    if parallel.startswith("ddp"):
        view = parallel == "ddp, views"
        whole = DistributedDataParallel(model, gradient_as_bucket_view=view)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = GradScaler("cpu", policy=policy, sync=sync)
    wrong = who == "all" or (who == "one" and dist.get_rank() == 0)
    told, scales = [], []
    for step in range(1, 25):
        source = torch.Generator().manual_seed(97 * step + dist.get_rank())
        optimizer.zero_grad(set_to_none=bool(step % 2))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss = whole(torch.randn(4, 3, generator=source)).square().mean()
            scaler.scale(loss).backward()
            if wrong:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            elif who == "nobody, averaged":
                for param in model.parameters():
                    param.grad.div_(2)
            elif who == "nobody, unscaled":
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        told += [step for one in caught if "were clipped" in str(one.message)]
        scales.append(scaler.get_scale())
    return told, scales
