"""What crews are asked to do when some ranks run out of data before others."""

import gc
import math
import warnings
from contextlib import nullcontext, suppress
from typing import Any

import torch
from tasks import OPTIMIZERS
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.modules.module import _global_forward_pre_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from buoy.torch import GradScaler


def trainer(kind: str, policy: str | None) -> Any:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    optimizer = OPTIMIZERS[kind](model.parameters())
    rule = {} if policy else {"growth_interval": 3}
    return model, optimizer, GradScaler("cpu", 64.0, policy=policy, **rule)


def uneven(
    kind: str, policy: str | None, clip: bool, parts: int, counts: list[int]
) -> Any:
    """Train on so many batches per rank; one of the last ones overflows."""
    model, optimizer, scaler = trainer(kind, policy)
    rank = dist.get_rank()
    norms = []
    with warnings.catch_warnings(), Join([model, scaler]):
        for step in range(counts[rank]):
            optimizer.zero_grad()
            for part in range(parts):
                x = torch.full((2, 3), 1.0 + step + part + rank)
                scaler.scale(model(x).square().mean()).backward()
            bad = step == max(counts) - 2 and counts[rank] == max(counts)
            if bad:
                model.module[0].weight.grad[0, 0] = math.inf
            if clip:
                grads = [p.grad / scaler.get_scale() for p in model.parameters()]
                true = get_total_norm(grads).item()
                norms.append((scaler.clip_grad_norm_(optimizer, 1.0).item(), true))
            scaler.step(optimizer)
            scaler.update()
    weights = [param.detach().clone() for param in model.parameters()]
    held = {**scaler.state_dict(), "turn": scaler._turn}
    after = ordinary(model, optimizer, scaler)
    return norms, held, weights, after


def odd(kind: str, counts: list[int]) -> Any:
    """Train in a way that a rank without data cannot know from its own past."""
    model, optimizer, scaler = trainer("sgd", None)
    if kind == "a group apart":
        scaler = GradScaler("cpu", 64.0, process_group=dist.new_group())
    joined, pairs = [model, scaler], []
    if kind == "a sharded optimizer":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        joined.append(optimizer)
    with warnings.catch_warnings(), Join(joined):
        for step in range(counts[dist.get_rank()]):
            optimizer.zero_grad()
            x = torch.full((2, 3), 1.0 + step + dist.get_rank())
            losses = model(x).square().mean(0)
            if kind == "two losses":
                scaler.scale(losses[0]).backward(retain_graph=True)
                losses = losses[1:]
            scaler.scale(losses.mean()).backward()
            if kind == "a bad start" and step == 0:
                model.module[0].weight.grad[0, 0] = math.inf
            if kind != "two losses":
                grads = [p.grad / scaler.get_scale() for p in model.parameters()]
                if kind == "by hand":
                    scaler.unscale_(optimizer)
                norm = scaler.clip_grad_norm_(optimizer, 1.0).item()
                pairs.append((norm, get_total_norm(grads).item()))
            scaler.step(optimizer)
            scaler.update()
    held = {**scaler.state_dict(), "turn": scaler._turn}
    return pairs, held, ordinary(model, optimizer, scaler)


def windows(counts: list[list[int]]) -> Any:
    """Accumulate over two batches, in so many epochs of so many batches per rank."""
    model, optimizer, scaler = trainer("sgd", None)
    for epoch in counts:
        optimizer.zero_grad()
        with warnings.catch_warnings(), Join([model, scaler]):
            for batch in range(epoch[dist.get_rank()]):
                shared = nullcontext() if batch % 2 else model.no_sync()
                with shared:
                    scaler.scale(model(torch.ones(2, 3)).square().mean()).backward()
                if batch % 2:
                    scaler.unscale_(optimizer)
                    scaler.clip_grad_norm_(optimizer, 1.0)
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
    return {**scaler.state_dict(), "turn": scaler._turn}


def broken_off() -> int:
    """Leave `Join` by an exception; count what is left once the scaler is gone."""
    model, optimizer, scaler = trainer("sgd", None)
    before = len(_global_forward_pre_hooks)
    with suppress(KeyError), Join([model, scaler]):
        ordinary(model, optimizer, scaler)
        raise KeyError
    del scaler
    gc.collect()
    return len(_global_forward_pre_hooks) - before


def ended_early() -> Any:
    """Let the first rank to run out of data end all; then go on with a policy."""
    model, optimizer, scaler = trainer("sgd", "headroom")
    try:
        with (
            warnings.catch_warnings(),
            Join([model, scaler], throw_on_early_termination=True),
        ):
            for _ in range(2 + dist.get_rank()):
                ordinary(model, optimizer, scaler)
    except RuntimeError as error:
        return str(error), scaler._uneven, scaler._listeners
    return "nothing happened"


def not_followed() -> str:
    """Name a scaler that has a spike guard."""
    model, _, _ = trainer("sgd", None)
    try:
        Join([model, GradScaler("cpu", spike_guard="skip")])
    except ValueError as error:
        return str(error)
    return "nothing happened"


def ordinary(model: Any, optimizer: Any, scaler: Any) -> Any:
    """Take one more step, outside: nothing of `Join` may be left."""
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(2, 3)).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler.last_step.applied, scaler.get_scale(), scaler._listeners


def unnamed() -> Any:
    """Name the model alone to `Join`."""
    model, optimizer, scaler = trainer("sgd", None)
    before = []
    try:
        with warnings.catch_warnings(), Join([model]):
            for _ in range(2 + dist.get_rank()):
                before = [param.detach().clone() for param in model.parameters()]
                ordinary(model, optimizer, scaler)
    except RuntimeError as error:
        same = zip(before, model.parameters(), strict=True)
        kept = all(torch.equal(a, b) for a, b in same)
        return type(error).__name__, getattr(error, "absent", None), str(error), kept
    return "nothing happened"


def misnamed() -> str:
    """Name the scaler first."""
    model, _, scaler = trainer("sgd", None)
    try:
        Join([scaler, model])
    except ValueError as error:
        return str(error)
    return "nothing happened"


def compiled() -> str:
    """Compile a step that other ranks take part in."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    scaler = GradScaler("cpu", 64.0, sync="never")
    scaler.scale(model(torch.ones(2, 3)).square().mean()).backward()

    @torch.compile(fullgraph=True, backend="eager")
    def step() -> None:
        scaler.step(optimizer)

    try:
        step()
    except RuntimeError as error:
        return str(error)
    return "nothing happened"
