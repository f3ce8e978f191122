"""What crews are asked to do where ranks do different things in the same step."""

import copy
import math
import pickle
import warnings
from typing import Any

import torch
from layouts import local
from tasks import layer, one_step
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

from buoy._backends import torch as backend
from buoy.torch import GradScaler, RankMismatchError


def stray(kind: str, parallel: str, hidden: bool) -> Any:
    """Let rank 0 do something that the others do not; say what came of it."""
    seen = backend.in_host_memory
    if hidden:
        backend.in_host_memory = lambda tensor: False
    try:
        return _stray(kind, parallel, sync="never" if hidden else "auto")
    finally:
        backend.in_host_memory = seen


def _stray(kind: str, parallel: str, sync: Any) -> Any:
    model, alone = layer(), dist.get_rank() == 0
    whole = DistributedDataParallel(model) if parallel == "ddp" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = "loss_ahead" if kind == "foresees" and alone else None
    guard = "skip" if kind.startswith("guards") and alone else None
    scaler = GradScaler("cpu", 64.0, policy=policy, spike_guard=guard, sync=sync)
    before = []
    try:
        for step in range(48):
            if step == 0 or (step == 1 and kind == "clips later"):
                before = [param.detach().clone() for param in model.parameters()]
            optimizer.zero_grad()
            scaler.scale(whole(torch.ones(4, 3)).square().mean()).backward()
            _clip(scaler, optimizer, kind, alone=alone, first=step == 0)
            scaler.step(optimizer)
            scaler.update()
    except RankMismatchError as error:
        same = zip(before, model.parameters(), strict=True)
        return str(error), all(torch.equal(a, b) for a, b in same)
    return "nothing happened", None


def _clip(scaler: Any, optimizer: Any, kind: str, *, alone: bool, first: bool) -> None:
    if "by hand" in kind:
        scaler.unscale_(optimizer)
    order = torch.inf if kind == "clips by hand" else 2.0
    everybody = kind == "clips later" and first
    if kind.startswith("clips") and (alone or everybody):
        scaler.clip_grad_norm_(optimizer, 1.0, order)


def evaluations(bad: bool) -> Any:
    """Step by a closure that overflows on rank 1, once; give what every rank has."""
    model = layer()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    scaler, found = GradScaler("cpu", 64.0), []
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            spoilt = bad and step == 1 and dist.get_rank() == 1
            return model(torch.ones(4, 3)).square().mean() * (
                math.inf if spoilt else 1.0
            )

        scaler.step(optimizer, closure)
        scaler.update()
        found.append((scaler.last_step.applied, scaler.get_scale()))
    return found, [param.tolist() for param in model.parameters()]


def read_after_unscale(clip: bool) -> Any:
    """Read what other libraries read after `unscale_`, with an inf on rank 1."""
    model = layer()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", 64.0)
    scaler.scale(model(torch.ones(4, 3)).square().mean()).backward()
    if dist.get_rank() == 1:
        local(model.weight.grad).fill_(math.inf)
    scaler.unscale_(optimizer)
    norm = scaler.clip_grad_norm_(optimizer, 1.0).item() if clip else math.inf
    state = scaler._per_optimizer_states[id(optimizer)]
    found = [flag.item() for flag in state["found_inf_per_device"].values()]
    scaler.step(optimizer)
    scaler.update()
    return found, norm, scaler.last_step.applied, scaler.get_scale()


def own_line() -> Any:
    """Say how the scaler asks where nobody named a backend."""
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", 64.0)
    scaler.scale(model(torch.ones(4, 3)).square().mean()).backward()
    scaler.step(optimizer)
    (line,) = scaler._sharing.communicator.send_groups(torch.device("cpu"))
    return dist.get_backend(), line is dist.group.WORLD


def kept_low() -> str:
    """Let FSDP1 keep gradients in FP16 beside parameters in FP32."""
    half = MixedPrecision(param_dtype=torch.float16, keep_low_precision_grads=True)
    model = FullyShardedDataParallel(
        layer(), mixed_precision=half, device_id=torch.device("cpu")
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", 64.0)
    scaler.scale(model(torch.ones(4, 3).half()).float().square().mean()).backward()
    try:
        scaler.step(optimizer)
    except ValueError as error:
        return str(error)
    return "nothing happened"


def copied(given: bool) -> Any:
    """Copy a scaler that agrees with a group, or with nobody; say who skips."""
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    group = dist.new_group() if given else ()
    scaler = GradScaler("cpu", 64.0, process_group=group)
    one_step(scaler, model, optimizer)
    again = pickle.loads(pickle.dumps(scaler))  # noqa: S301 - it is ours
    copies = [copy.deepcopy(scaler), again]
    bad = math.inf if dist.get_rank() == 1 else None
    members = [scaler, *copies, scaler.group("another")]
    roots = [scaler, *copies, scaler]
    found = [
        one_step_of(root, member, model, optimizer, bad)
        for root, member in zip(roots, members, strict=True)
    ]
    return found, [member.get_scale() for member in members]


def one_step_of(
    root: Any, scaler: Any, model: Any, optimizer: Any, bad: float | None
) -> bool:
    """Take a step with a scaler, or with a group of `root`."""
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(4, 3)).square().mean()).backward()
    if bad is not None:
        model.weight.grad[0, 0] = bad
    scaler.step(optimizer)
    root.update()
    return scaler.last_step.applied


def uneven() -> Any:
    """Let DDP's own `Join` end rank 0's epoch before rank 1's."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", 64.0, growth_interval=3)
    before = []
    try:
        with warnings.catch_warnings(), Join([model]):
            for _ in range(2 + dist.get_rank()):
                before = [param.detach().clone() for param in model.parameters()]
                one_step(scaler, model, optimizer)
    except RuntimeError as error:
        same = zip(before, model.parameters(), strict=True)
        kept = all(torch.equal(a, b) for a, b in same)
        return type(error).__name__, getattr(error, "absent", None), str(error), kept
    return "nothing happened"


def compiled() -> str:
    """Compile a step that other ranks take part in."""
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
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
