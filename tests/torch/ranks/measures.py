"""What crews are asked to measure: norms in places where they once went wrong."""

import math
from typing import Any

import torch
from tasks import columns, layer
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.utils import clip_grad_norm_, get_total_norm

from buoy._backends import torch as backend
from buoy.torch import GradScaler


class Dormant(nn.Module):
    """Begins with zeros in places, as diffusion models do: no gradient passes them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 8)
        self.gain = nn.Linear(4, 8, bias=False)
        self.outer = nn.Linear(8, 4, bias=False)
        nn.init.zeros_(self.gain.weight)
        nn.init.zeros_(self.outer.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x) * (1.0 + self.gain(x)))


def dormant(original: bool, by_hand: bool) -> list[tuple[float, float]]:
    """Give norms, and the true ones, of FSDP1's shards that look alike at first."""
    whole, model = Dormant(), Dormant()
    how: Any = {"use_orig_params": original, "device_id": torch.device("cpu")}
    for name in ("inner", "gain", "outer"):
        part = getattr(model, name)
        setattr(model, name, FullyShardedDataParallel(part, **how))
    sharded = FullyShardedDataParallel(model, **how)
    true = torch.optim.SGD(whole.parameters(), lr=0.5)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.5)
    scaler = GradScaler("cpu", 8.0, model=sharded)
    found = []
    for step in range(4):
        true.zero_grad()
        optimizer.zero_grad()
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        mine = x.chunk(dist.get_world_size())[dist.get_rank()]
        (whole(x) - x.flip(1)).square().mean().backward()
        scaler.scale((sharded(mine) - mine.flip(1)).square().mean()).backward()
        if by_hand:
            scaler.unscale_(optimizer)
        norm = scaler.clip_grad_norm_(optimizer, 1e9).item()
        found.append((norm, clip_grad_norm_(whole.parameters(), 1e9).item()))
        true.step()
        scaler.step(optimizer)
        scaler.update()
    return found


def idle_experts(idle: str) -> list[tuple[float, float]]:
    """Give norms, and true ones, of two experts that began alike, on two ranks each.

    In the first step nobody asks them anything; in the second one of them is asked.
    """
    torch.manual_seed(0)
    shared, expert = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(4))
    optimizer = torch.optim.SGD([shared, expert], lr=0.0)
    group = {expert: columns()}.get
    scaler, found = GradScaler("cpu", 4.0, norm_group=group), []
    for step in range(4):
        grads = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        grads[1 + step :] = 0.0
        scaler.scale(torch.zeros((), requires_grad=True))
        mine = grads[1 + dist.get_rank() // 2]
        shared.grad = torch.cat([grads[0], torch.ones(1)]) * 4.0
        expert.grad = mine * 4.0 if mine.any() or idle == "zero" else None
        true = torch.linalg.vector_norm(torch.cat([grads.flatten(), torch.ones(1)]))
        norm = scaler.clip_grad_norm_(optimizer, 1e9).item()
        found.append((norm, true.item()))
        scaler.step(optimizer)
        scaler.update()
    return found


def _scaled(kind: str = "sgd", **options: Any) -> Any:
    """Give a layer with gradients, its optimizer and a scaler."""
    model = layer()
    make = {
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.1),
        "fused": lambda: torch.optim.AdamW(model.parameters(), lr=0.1, fused=True),
    }
    scaler = GradScaler("cpu", 64.0, **options)
    scaler.scale(model(torch.ones(4, 3)).square().mean()).backward()
    return model, make[kind](), scaler


def one_is_nan(order: float) -> float:
    """Clip what was unscaled by hand, with a NaN on one rank."""
    model, optimizer, scaler = _scaled()
    if dist.get_rank() == 1:
        model.weight.grad[0, 0] = math.nan
    scaler.unscale_(optimizer)
    return scaler.clip_grad_norm_(optimizer, 1.0, order).item()


def refused(order: float) -> str:
    """Ask for a norm that has no parts; then go on."""
    _, optimizer, scaler = _scaled()
    try:
        scaler.clip_grad_norm_(optimizer, 1.0, order)
    except ValueError as error:
        scaler.step(optimizer)
        scaler.update()
        return str(error)
    return "nothing happened"


def two_orders(kind: str) -> Any:
    """Clip by one norm, then measure another."""
    model, optimizer, scaler = _scaled(kind)
    true = [p.grad.clone() / 64.0 for p in model.parameters()]
    size = get_total_norm(true).item()
    scaler.clip_grad_norm_(optimizer, size / 2)
    found = [
        scaler.clip_grad_norm_(optimizer, 1e9, order).item() for order in (math.inf, 1)
    ]
    return found, [get_total_norm(true, order).item() / 2 for order in (math.inf, 1)]


def huge_where_nobody_looks() -> Any:
    """Clip gradients whose squares overflow, on a device that has to be asked."""
    seen = backend.in_host_memory
    backend.in_host_memory = lambda tensor: False
    try:
        model, optimizer, scaler = _scaled("fused")
        for param in model.parameters():
            param.grad.mul_(1e25)
        true = get_total_norm([p.grad.double() / 64.0 for p in model.parameters()])
        return scaler.clip_grad_norm_(optimizer, 1.0).item(), true.item()
    finally:
        backend.in_host_memory = seen


def guarded_without_gradients() -> Any:
    """Unscale by hand under a spike guard, on one rank without gradients."""
    _, optimizer, scaler = _scaled(spike_guard="skip")
    if dist.get_rank() == 1:
        optimizer.zero_grad()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return scaler.last_step.applied, scaler.last_step.norm


def replaced_parameters() -> list[float]:
    """Give one optimizer a part that all ranks hold, then one of each rank's own."""
    apart: Any = {}
    scaler, found = GradScaler("cpu", 1.0, norm_group=apart.get), []
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(4))], lr=0.1)
    for own in (0.0, 1.0):
        part = nn.Parameter(torch.arange(4.0) + own * dist.get_rank())
        part.grad = torch.ones(4)
        if own:
            apart[part] = dist.group.WORLD
        optimizer.param_groups[0]["params"] = [part]
        scaler.scale(torch.zeros((), requires_grad=True))
        found.append(scaler.clip_grad_norm_(optimizer, 1e9).item())
        scaler.step(optimizer)
        scaler.update()
    return found


def underflowing(who: int | None) -> Any:
    """Let a rank's gradients be too small in part; give what the policy made of it."""
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = GradScaler("cpu", policy="headroom")
    for _ in range(34):  # of which three count small gradients
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(4, 3)).square().mean()).backward()
        if dist.get_rank() == who:
            model.bias.grad.fill_(2.0**-23)
        scaler.step(optimizer)
        scaler.update()
    return scaler.state_dict()["buoy"]["state"]
