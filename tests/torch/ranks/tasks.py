"""What crews are asked to do, beside training in a layout."""

import math
import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from layouts import (
    OPTIMIZERS,
    Event,
    Layout,
    Schedule,
    batch,
    built,
    finish,
    local,
    mse,
    spoil,
)
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import Shard, distribute_tensor

from buoy._backends import torch as backend
from buoy.torch import GradScaler, OptionError, RankMismatchError
from buoy.torch.step import gather_gradients, inspect_gradients
from tests.told import Told

sys.path.insert(0, str(Path(__file__).parents[1]))


def layer(bias: bool = True) -> nn.Linear:
    """Make a small layer, the same on every rank."""
    torch.manual_seed(0)
    return nn.Linear(3, 2, bias=bias)


def one_step(
    scaler: Any, model: nn.Module, optimizer: Any, bad: float | None = None
) -> bool:
    """Train on one batch; spoil a gradient if asked to."""
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(4, 3)).square().mean()).backward()
    if bad is not None:
        next(model.parameters()).grad[0, 0] = bad
    scaler.step(optimizer)
    scaler.update()
    return scaler.last_step.applied


# -- ranks that differ ----------------------------------------------------------------


def differ(what: str, kind: str, policy: str | None, hidden: bool) -> Any:
    """Let rank 1 hold another scale or counter; say what comes of it."""
    seen = backend.in_host_memory
    if hidden:
        backend.in_host_memory = lambda tensor: False
    try:
        return _differ(what, kind, policy)
    finally:
        backend.in_host_memory = seen


def _differ(what: str, kind: str, policy: str | None) -> Any:
    model = layer()
    optimizer = OPTIMIZERS[kind](model.parameters())
    scaler = GradScaler("cpu", 64.0, policy=policy)
    one_step(scaler, model, optimizer)
    if dist.get_rank() == 1:
        state = scaler.state_dict()
        if what == "scale":
            scaler.update(16.0)
        elif what == "turn":
            scaler._loss_scale.turn += 3
        else:
            scaler.load_state_dict({**state, "_growth_tracker": 7})
    before = [p.detach().clone() for p in model.parameters()]
    try:
        applied = [one_step(scaler, model, optimizer) for _ in range(3)]
    except RankMismatchError as error:
        still = zip(before, model.parameters(), strict=True)
        return str(error), error.held, all(torch.equal(a, b) for a, b in still)
    return applied, scaler.get_scale(), scaler._loss_scale.turn


def late(kind: str) -> Any:
    """Differ where the device decides and nobody asks it; count steps until told."""
    seen = backend.in_host_memory
    backend.in_host_memory = lambda tensor: False
    try:
        model = layer()
        optimizer = OPTIMIZERS[kind](model.parameters())
        scaler = GradScaler("cpu", 64.0, sync="never")
        one_step(scaler, model, optimizer)
        if dist.get_rank() == 1:
            scaler.update(16.0)
        before = [p.detach().clone() for p in model.parameters()]
        for step in range(64):
            try:
                one_step(scaler, model, optimizer)
            except RankMismatchError:
                still = zip(before, model.parameters(), strict=True)
                return step, all(torch.equal(a, b) for a, b in still)
        return None
    finally:
        backend.in_host_memory = seen


# -- ranks that are not there ---------------------------------------------------------


def absent(who: int, killed: bool) -> Any:
    """Take a step that one rank stays away from, or does not live to see."""
    model = layer()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    scaler = GradScaler("cpu", 64.0)
    one_step(scaler, model, optimizer)
    if dist.get_rank() == who:
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
        return "away"
    before = scaler.state_dict()
    try:
        one_step(scaler, model, optimizer)
    except RuntimeError as error:
        kept = scaler.state_dict() == before
        return type(error).__name__, getattr(error, "absent", None), str(error), kept
    return "nothing happened"


def without_gradients(kind: str, clip: bool, nobody: bool) -> Any:
    """Step although rank 1 (or nobody) has a gradient; rank 0's overflows once."""
    model = layer()
    optimizer = OPTIMIZERS[kind](model.parameters())
    scaler = GradScaler("cpu", 64.0, growth_interval=2)
    found = []
    for step in range(4):
        optimizer.zero_grad()
        loss = scaler.scale(model(torch.ones(4, 3)).square().mean())
        if dist.get_rank() == 0 and not nobody:
            loss.backward()
            if step == 1:
                model.weight.grad[0, 0] = math.inf
        if clip:
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        found.append((scaler.last_step.applied, scaler.get_scale()))
    return found


def without_parameters() -> Any:
    """Step although rank 1 has an optimizer of nothing, and no loss."""
    model = layer()
    mine = list(model.parameters()) if dist.get_rank() == 0 else []
    optimizer = torch.optim.SGD([{"params": mine}], lr=0.1)
    scaler = GradScaler("cpu", 64.0, growth_interval=2)
    found = []
    for step in range(4):
        optimizer.zero_grad()
        if mine:
            scaler.scale(model(torch.ones(4, 3)).square().mean()).backward()
            if step == 1:
                model.weight.grad[0, 0] = math.inf
        norm = scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        found.append((scaler.last_step.applied, scaler.get_scale(), norm.item()))
    return found


def nobody_scales() -> Any:
    """Step with gradients that nobody multiplied by a scale."""
    model = layer()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    model(torch.ones(4, 3)).square().mean().backward()
    try:
        GradScaler("cpu").step(optimizer)
    except AssertionError as error:
        return str(error)
    return "nothing happened"


# -- groups ---------------------------------------------------------------------------


def groups(kind: str) -> Any:
    """Let rank 0 overflow; say who skipped, with 4 ranks in groups of some kind."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    given: Any = {
        "default": None,
        "world": dist.group.WORLD,
        "row": mesh["columns"].get_group(),
        "several": [mesh["rows"].get_group(), mesh["columns"].get_group()],
        "mesh": mesh,
        "submesh": mesh["columns"],
        "nobody": (),
    }[kind]
    model = layer()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    scaler = GradScaler("cpu", 64.0, process_group=given)
    bad = math.inf if rank == 0 else None
    applied = one_step(scaler, model, optimizer, bad)
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(4, 3)).square().mean()).backward()
    norm = scaler.clip_grad_norm_(optimizer, 1e9).item() if kind != "nobody" else 0.0
    scaler.step(optimizer)
    scaler.update()
    return applied, scaler.get_scale(), norm


def other_half() -> Any:
    """Train on ranks 2 and 3 only, which say so; 0 and 1 do nothing."""
    half = dist.new_group([2, 3])
    if dist.get_rank() < 2:
        return None
    model = layer()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    scaler = GradScaler("cpu", 64.0, process_group=half)
    bad = math.nan if dist.get_rank() == 3 else None
    return [one_step(scaler, model, optimizer, bad) for _ in range(2)]


def destroyed(option: str) -> str:
    """Destroy the process group that a scaler was given; give the error of a clip."""
    group = dist.new_group()
    model = layer()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    scaler = GradScaler("cpu", 64.0, **{option: group})
    dist.destroy_process_group(group)
    del group
    try:
        scaler.scale(model(torch.ones(4, 3)).square().mean()).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
    except OptionError as error:
        return str(error)
    return ""


# -- how it is sent -------------------------------------------------------------------


def overlaps(fused: bool) -> bool:
    """Look at gradients while the other rank has not even begun to."""
    store = dist.distributed_c10d._get_default_store()
    model = layer()
    optimizer = OPTIMIZERS["fused" if fused else "sgd"](model.parameters())
    scaler = GradScaler("cpu", 64.0)
    one_step(scaler, model, optimizer)  # makes the group, and that all ranks do at once
    scaler.scale(model(torch.ones(4, 3)).square().mean()).backward()
    key = f"looked {fused}"
    if dist.get_rank() == 1:
        store.wait([key])
    if fused:
        pending = scaler._pending(optimizer, "step")
        gather_gradients(scaler, pending, allow_fp16=True)
        inspect_gradients(scaler, scaler._placed("step"), pending)
    else:
        scaler.unscale_(optimizer)
    if dist.get_rank() == 0:
        store.set(key, "yes")
    scaler.step(optimizer)
    scaler.update()
    return scaler.last_step.applied


def collectives(max_norm: float | None, policy: Any, by_hand: bool) -> dict[str, int]:
    """Count what one step sends, once it runs."""
    model = layer()
    optimizer = OPTIMIZERS["fused"](model.parameters())
    scaler = GradScaler("cpu", policy=policy)
    schedule = Schedule((), max_norm=max_norm, by_hand=by_hand)
    for step in range(3):
        optimizer.zero_grad()
        if step == 2:
            profile = torch.profiler.profile()
            profile.__enter__()
        scaler.scale(model(torch.ones(4, 3)).square().mean()).backward()
        finish(scaler, optimizer, schedule)
    profile.__exit__(None, None, None)
    found: dict[str, int] = {}
    for event in profile.events():
        if event.name.startswith("gloo:"):
            found[event.name] = found.get(event.name, 0) + 1
    return found


def unread(kind: str, clip: bool, policy: str | None) -> Any:
    """Take steps during which no value may be read on the host."""
    from no_host_reads import no_host_reads

    model = layer()
    optimizer = OPTIMIZERS[kind](model.parameters())
    scaler = GradScaler("cpu", 64.0, policy=policy)
    found = []
    for step in range(5):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 3)).square().mean()
        if step < 2:  # the first looks at what it trains, and the second compares
            _finish_unread(scaler, optimizer, loss, clip)
        else:
            with no_host_reads():
                bad = step == 3 and dist.get_rank() == 1
                _finish_unread(scaler, optimizer, loss, clip, bad=bad)
        found.append((scaler.last_step.applied, scaler.get_scale()))
    return found


def told(kind: str, clip: bool, hidden: bool, silent: int | None) -> Any:
    """Let one rank's loss be inf, or NaN, or unknown; return what all were told."""
    from no_host_reads import no_host_reads

    model, rank = layer(), dist.get_rank()
    optimizer = OPTIMIZERS[kind](model.parameters())
    scaler = GradScaler("cpu", policy=Told(), sync="never")
    found = []
    for step, bad in enumerate([None, None, math.inf, None, math.nan, -math.inf, None]):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 3)).square().mean() * 0.0
        if bad is not None and rank == 1:
            loss = loss + bad
        if rank != silent or step == 0:
            loss = scaler.scale(loss)
        loss.backward()
        reads = no_host_reads() if hidden and step > 1 else nullcontext()
        with reads:
            if clip:
                scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
        found.append(float(scaler._loss_scale.state.told))
    return found


def told_of_sharded_losses() -> Any:
    """Scale losses of which each rank holds a part."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    optimizer = OPTIMIZERS["sgd"]([weight])
    scaler = GradScaler("cpu", policy=Told())
    found = []
    for where in (None, 0, 3):
        optimizer.zero_grad()
        added = torch.zeros(4)
        if where is not None:
            added[where] = math.inf
        losses = weight * 0.0 + distribute_tensor(added, mesh, [Shard(0)])
        scaler.scale(losses).sum().backward()
        scaler.step(optimizer)
        scaler.update()
        found.append(scaler._loss_scale.state.told)
    return found


def untold() -> Any:
    """Scale no loss on any rank, after a first step; return what was told."""
    model = layer()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    scaler = GradScaler("cpu", policy=Told())
    found = []
    for scales in (True, False, True):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 3)).square().mean()
        (scaler.scale(loss) if scales else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append(scaler._loss_scale.state.told)
    return found


def _finish_unread(
    scaler: Any, optimizer: Any, loss: torch.Tensor, clip: bool, *, bad: bool = False
) -> None:
    scaler.scale(loss).backward()
    if bad:
        optimizer.param_groups[0]["params"][0].grad.mul_(math.inf)
    if clip:
        scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()


# -- the loss, foreseen ---------------------------------------------------------------


def jump(silent: int | None) -> Any:
    """Let one rank's loss jump; say the scale that its step was computed with."""
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = GradScaler("cpu", policy="loss_ahead")
    used = []
    for step in range(12):
        optimizer.zero_grad()
        height = 2.0**12 if step == 10 and dist.get_rank() == 1 else 1.0
        if silent is None or step != 5 or dist.get_rank() != silent:
            loss = model(torch.ones(4, 3)).square().mean() * height
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        used.append(scaler.last_step.scale)
        scaler.update()
    return used


def zeros_of_one_rank(policy: str | None, traced: str | None) -> int:
    """Train with gradients of zero on rank 1 alone; count the steps."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    options: Any = {"on_stuck": "raise", "patience": 4, "trace": traced}
    scaler = GradScaler("cpu", policy=policy, **options)
    for _ in range(12):
        optimizer.zero_grad()
        scaler.scale(weight.sum() * (1 - dist.get_rank())).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler._log.watch.steps


# -- norms ----------------------------------------------------------------------------


def norm_of(name: str, order: float, size: float) -> float:
    """Take the norm of one step's gradients, made larger by a factor."""
    layout = built(name)
    scaler = GradScaler("cpu", 1.0, **layout.options)
    layout.reset(scaler)
    optimizer = OPTIMIZERS["sgd"](layout.params())
    optimizer.zero_grad()
    layout.backward(scaler, 0)
    with torch.no_grad():
        for param in layout.params():
            if param.grad is not None:
                local(param.grad).mul_(size)
    return scaler.clip_grad_norm_(optimizer, 1e30, order).item()


def columns() -> Any:
    """Give the group of the ranks that hold the parts of one model, of four ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("part", "copy"))
    return mesh["part"].get_group()


def norm_by_place(kind: str) -> Any:
    """Take norms of plain parameters whose places only the ranks together know."""
    rank, group = dist.get_rank(), dist.group.WORLD
    torch.manual_seed(rank // 2 if kind == "replicated stages" else 0)
    if kind == "zeros":  # two stages that begin with the same numbers
        held = [nn.Parameter(torch.zeros(4))]
        held[0].grad = torch.full((4,), 1.0 + rank)
    elif kind == "tied":  # both stages hold the embedding, at different places
        tied = nn.Parameter(torch.randn(4))
        tied.grad = torch.arange(4.0)
        own = nn.Parameter(torch.full((4,), float(rank)))
        own.grad = torch.ones(4)
        held = [tied, own] if rank == 0 else [own, tied]
        group = {own: group}.get
    elif kind == "one stage":  # of a script that always passes the group of its stages
        held = [nn.Parameter(torch.randn(4))]
        held[0].grad = torch.ones(4)
        group, _ = dist.new_subgroups(1)
    else:
        held = [nn.Parameter(torch.randn(4))]
        held[0].grad = torch.full((4,), 1.0 + rank // 2)
        group = columns()
    optimizer = torch.optim.SGD(held, lr=0.1)
    scaler = GradScaler("cpu", 1.0, norm_group=group)
    scaler.scale(torch.zeros((), requires_grad=True))
    return scaler.clip_grad_norm_(optimizer, 1e9).item()


# -- what stock scalers do ------------------------------------------------------------


def with_scaler(
    name: str, kind: str, which: str, event: Event, ready: bool, steps: int = 2
) -> Any:
    """Take steps with a scaler, an overflow in the first; give the scales."""
    layout: Layout = built(name)
    make = {"stock": torch.amp.GradScaler, "sharded": ShardedGradScaler}
    scaler: Any = make.get(which, GradScaler)("cpu", init_scale=1024.0)
    if which != "buoy":
        scaler.loss_fn = lambda fn: lambda x, y: scaler.scale(fn(x, y))
    if ready:
        scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    layout.reset(scaler)
    optimizer = OPTIMIZERS[kind](layout.params())
    scales = []
    for step in range(steps):
        optimizer.zero_grad()
        layout.backward(scaler, step)
        if step == 0 and dist.get_rank() == event.rank:
            spoil(layout.params(), event)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


# -- checkpoints ----------------------------------------------------------------------


def train_and_save(
    folder: str, first: int, last: int, killed: int | None, policy: str | None
) -> Any:
    """Train with FSDP2, saving every second step; one rank may be killed on the way."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    if dist.get_world_size() > 1:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        torch.distributed.fsdp.fully_shard(model, mesh=mesh)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    how = {"growth_interval": 2} if policy is None else {}
    scaler = GradScaler("cpu", 2.0**8, policy=policy, **how)

    def state() -> dict[str, Any]:
        weights, slots = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": slots, "scaler": scaler.state_dict()}

    if first:
        held = state()
        dcp.load(held, checkpoint_id=f"{folder}/{first}")
        set_state_dict(
            model,
            optimizer,
            model_state_dict=held["model"],
            optim_state_dict=held["optimizer"],
        )
        scaler.load_state_dict(held["scaler"])
    scales = [scaler.get_scale()]
    for step in range(first, last):
        if killed is not None and step == 5 and dist.get_rank() == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        rank, size = dist.get_rank(), dist.get_world_size()
        x, y = (part[:, 0].chunk(size)[rank] for part in batch(step))
        scaler.scale(mse(model(x), y)).backward()
        if step in (1, 6) and dist.get_rank() == 0:
            local(next(model.parameters()).grad)[0, 0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        if step % 2:
            dcp.save(state(), checkpoint_id=f"{folder}/{step + 1}")
    full = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
    return scales, [p.detach().clone() for p in full]
