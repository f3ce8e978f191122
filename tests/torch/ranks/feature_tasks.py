"""What crews are asked to do with groups, re-runs, micro-batches and spikes."""

import math

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from buoy.torch import (
    GradScaler,
    OptionError,
    SpikeGuard,
)
from tests.pages import recipe


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


def loss_of(model, step):
    """Compute this rank's loss; the gradient passes through FP16."""
    source = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return model(torch.randn(5, 4, generator=source)).half().float().square().mean()


def summary(model, *scalers):
    """Give what has to be the same on every rank."""
    weights = [param.detach().double().sum().item() for param in model.parameters()]
    return weights, [scaler.get_scale() for scaler in scalers]


def run_again(policy, fused):
    """One rank overflows, then one rank has a NaN of its own."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=fused)
    scaler = GradScaler("cpu", policy=policy, init_scale=2.0**14)
    scaler.guard(model)
    attempts, applied = [], []
    for step in range(6):

        def one(step=step):
            attempts.append(step)
            factor = 1.0
            if dist.get_rank() == 1:
                factor = {2: 2.0**14, 4: math.nan}.get(step, 1.0)
            scaler.scale(loss_of(model, step) * factor).backward()

        scaler.run(one, optimizer)
        applied.append(scaler.last_step.applied)
    return attempts, applied, summary(model, scaler)


def micro_batches(fused):
    """A micro-batch is bad on one rank: all drop it."""
    page, model = recipe("guides/accumulation.md", "accumulate"), network()
    wrapped = DistributedDataParallel(model)
    page["model"] = model
    page["optimizer"] = torch.optim.Adam(model.parameters(), lr=0.01, fused=fused)
    page["scaler"] = GradScaler("cpu", init_scale=2.0**8)
    page["whole"] = GradScaler("cpu", policy="none")
    good = []
    for step in range(3):

        def losses(step=step):
            for part in range(4):
                bad = dist.get_rank() == 1 and (step, part) == (1, 2)
                yield loss_of(wrapped, 4 * step + part) * (math.inf if bad else 1.0)

        good.append(page["accumulate"](losses()))
        page["whole"].step(page["optimizer"])
        page["whole"].update()
    return good, page["whole"].last_step.applied, summary(model, page["scaler"])


def joint(fused):
    """Of two networks one fails on one rank: no network steps on any."""
    one, two = network(0), network(1)
    models = [DistributedDataParallel(one), DistributedDataParallel(two)]
    optimizers = [
        torch.optim.Adam(m.parameters(), lr=0.01, fused=fused) for m in models
    ]
    scaler = GradScaler("cpu", skip="joint", init_scale=2.0**8)
    groups = [scaler.group("one"), scaler.group("two")]
    applied = []
    for step in range(4):
        for index in (0, 1):
            optimizers[index].zero_grad()
            bad = (index, step, dist.get_rank()) == (1, 2, 1)
            loss = loss_of(models[index], step) * (math.inf if bad else 1.0)
            groups[index].scale(loss).backward()
            groups[index].step(optimizers[index])
        scaler.update()
        applied.append([scaler.last_step_of(o).applied for o in optimizers])
    return applied, summary(one, *groups), summary(two)


def spikes():
    """A spike on one rank is one for all."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    guard = SpikeGuard(warmup=4, least=20.0)
    scaler = GradScaler("cpu", init_scale=4.0, spike_guard=guard)
    applied = []
    for step in range(8):
        optimizer.zero_grad()
        high = 1e3 if (step, dist.get_rank()) == (6, 1) else 1.0
        scaler.scale(loss_of(model, step) * high).backward()
        scaler.step(optimizer)
        scaler.update()
        applied.append(scaler.last_step.applied)
    return applied, scaler.spikes, summary(model, scaler)


def alone_with_shards(clip):
    """Step a model that is sharded with a scaler that asks no other rank."""
    model = fully_shard(network(), mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=4.0, process_group=())
    scaler.scale(loss_of(model, 0)).backward()
    try:
        if clip:
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
    except OptionError as error:
        return str(error)
    return "applied"
