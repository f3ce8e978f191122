"""What crews are asked to do where ranks do different things in the same step."""

import copy
import math
import pickle
from typing import Any

import torch
from tasks import layer, one_step
from torch import distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

from buoy.torch import GradScaler, RankMismatchError


def stray(kind: str) -> str:
    """Let rank 0 do something that the others do not."""
    model, alone = layer(), dist.get_rank() == 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = "headroom" if kind == "foresees" and alone else None
    scaler = GradScaler("cpu", 64.0, policy=policy)
    try:
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(4, 3)).square().mean()).backward()
            _clip(scaler, optimizer, kind, alone=alone, first=step == 0)
            scaler.step(optimizer)
            scaler.update()
    except RankMismatchError as error:
        return str(error)
    return "nothing happened"


def _clip(scaler: Any, optimizer: Any, kind: str, *, alone: bool, first: bool) -> None:
    if kind == "clips by hand":
        scaler.unscale_(optimizer)
    order = torch.inf if kind == "clips by hand" else 2.0
    everybody = kind == "clips later" and first
    if kind.startswith("clips") and (alone or everybody):
        scaler.clip_grad_norm_(optimizer, 1.0, order)


def own_line() -> Any:
    """Say how the scaler asks where nobody named a backend."""
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", 64.0)
    scaler.scale(model(torch.ones(4, 3)).square().mean()).backward()
    scaler.step(optimizer)
    (line,) = scaler._ranks.lines(torch.device("cpu"))
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
    found = [one_step_of(member, model, optimizer, bad) for member in members]
    return found, [member.get_scale() for member in members]


def one_step_of(scaler: Any, model: Any, optimizer: Any, bad: float | None) -> bool:
    """Take a step with a scaler, or with a group of one."""
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(4, 3)).square().mean()).backward()
    if bad is not None:
        model.weight.grad[0, 0] = bad
    scaler.step(optimizer)
    root = scaler if scaler._parent is None else scaler._parent()
    root.update()
    return scaler.last_step.applied
