"""The norm over all ranks, each part of the model counted once.

A rank cannot tell by itself whether a plain parameter is a replica (data parallel),
a shard (FSDP1) or its alone (a stage, an expert).  So, once per optimizer, ranks
compare what they hold: parts with the same content and the same gradient are one part.
Of parts that look alike and have no gradient yet that cannot be told: once one of them
has, ranks compare again.
From then on a norm costs one SUM all-reduce of two float64: the sum of powers, and how
many ranks it is of, because one that has no data left (`Join`) counts no replica.
"""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from buoy._backends import torch as backend
from buoy.torch import survey
from buoy.torch.gather import Gathered
from buoy.torch.ranks import Answer

if TYPE_CHECKING:
    from buoy.torch.contract import Contract

__all__ = ["ask_norm", "follow", "global_norm", "plan"]

# What a rank is going to ask after it has agreed, most last: the largest is done.
_NOTHING, _NORM, _COMPARE = 0.0, 1.0, 2.0


def plan(
    scaler: "Contract", optimizer: Any, seen: survey.Survey, order: float
) -> torch.Tensor:
    """Say what this rank will ask next: the norm, or first what all ranks hold."""
    home, shares = scaler._home(), scaler._shares
    ahead = _COMPARE
    if order == math.inf:
        ahead = _NOTHING
    elif shares.known(optimizer):
        ahead = _NORM
    said = torch.full((), ahead, dtype=torch.float32, device=home)
    doubted = shares.doubted(optimizer, tuple(seen.parts)) if ahead == _NORM else []
    if doubted:
        some = torch.stack([part.to(home) for part in doubted]).max() > 0
        said = torch.where(some, _COMPARE, said)
    return said


def global_norm(
    scaler: "Contract",
    optimizer: Any,
    record: dict[str, Any],
    gathered: Gathered,
    seen: survey.Survey,
    order: float,
) -> torch.Tensor:
    """Take the norm of all ranks' gradients, from those of this rank's own."""
    home = scaler._home()
    if order == math.inf:
        scaler._settle(record)
        largest: torch.Tensor = record["largest"]
        return largest
    shares = scaler._shares
    if not shares.certain(optimizer):
        scaler._settle(record)
        if not (shares.known(optimizer) and _planned(record) == _NORM):
            if _skipped(record, home):
                return torch.full((), torch.inf, dtype=torch.float32, device=home)
            shares.compare(optimizer, scaler)
    power = torch.zeros((), dtype=torch.float64, device=home)
    if gathered.grads:
        power = _power(gathered, seen, order, shares.weights(optimizer, home))
    if "plan" not in record:
        scaler._ranks.note("norm")  # having agreed does not tell of it
    total = ask_norm(scaler, power, present=True)
    scaler._settle(record)
    whole, there = total.wait()
    norm: torch.Tensor = (whole * (shares.base(optimizer) / there)).pow(1.0 / order)
    return norm


def follow(scaler: "Contract", record: dict[str, Any]) -> None:
    """Ask what the others ask after they have agreed, with nothing to tell."""
    ahead = _planned(record)
    if ahead == _NOTHING or (ahead == _COMPARE and _skipped(record, scaler._home())):
        return
    if ahead == _COMPARE:
        scaler._shares.listen(scaler)
    nothing = torch.zeros((), dtype=torch.float64, device=scaler._home())
    ask_norm(scaler, nothing, present=False).wait()


def _planned(record: dict[str, Any]) -> float:
    """Give what the ranks said that they would ask, if they did."""
    return backend.read([record["plan"]])[0] if "plan" in record else _COMPARE


def ask_norm(scaler: "Contract", power: torch.Tensor, *, present: bool) -> Answer:
    """Send off a sum of powers, and whether this rank has gradients to count at all."""
    both = torch.stack([power, torch.full_like(power, float(present))])
    return scaler._ranks.ask("norm", both, dist.ReduceOp.SUM)


def _power(
    gathered: Gathered, seen: survey.Survey, order: float, weights: torch.Tensor
) -> torch.Tensor:
    """Sum the norms' powers up, each by its share; finite if the gradients are."""
    home = weights.device
    sizes = torch.stack([part.to(home).double() for part in seen.parts])
    power = torch.dot(sizes.pow(order), weights)
    found = survey.seen_by_host(power.float())
    if found is None and seen.norm is not None:
        # A square may overflow alone; the survey's norm is finite then, or a bound.
        return torch.where(backend.nonfinite(power), seen.norm.double() ** order, power)
    if found is None or math.isfinite(found):
        return power
    exact = [
        torch.linalg.vector_norm(grad, order, dtype=torch.float64)
        for grad in gathered.grads
    ]
    return torch.dot(torch.stack(exact).pow(order), weights)


def _skipped(record: dict[str, Any], home: torch.device) -> bool:
    """Say whether the gradients cannot be compared: they are not finite, or none."""
    flag = record["found_inf_per_device"].get(home)
    return flag is None or bool(backend.read([flag])[0])
