"""The norm over all ranks, each part of the model counted once.

A rank cannot tell by itself whether a plain parameter is a replica (data parallel),
a shard (FSDP1) or its alone (a stage, an expert).  So, once per optimizer, ranks
compare what they hold: parts with the same content and the same gradient are one part.
From then on a norm costs one SUM all-reduce of two float64: the sum of powers, and how
many ranks it is of, because one that has no data left (`Join`) counts no replica.
"""

import hashlib
import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from buoy._backends import torch as backend
from buoy.torch import survey
from buoy.torch.gather import Gathered, local_grad, owners, parameters_of
from buoy.torch.ranks import Answer

if TYPE_CHECKING:
    from buoy.torch.contract import Contract

__all__ = ["Shares", "ask_norm", "global_norm"]

_CLOSE = 1e-3  # replicas' gradients may be summed up in another order
_SAMPLE = 4096  # elements at either end whose order is looked at


class Shares:
    """How many ranks hold each parameter, found out once per set of parameters."""

    def __init__(self) -> None:
        self._counts: dict[int, tuple[int, dict[int, int]]] = {}
        self._weights: dict[int, tuple[tuple[int, ...], torch.Tensor]] = {}

    def known(self, optimizer: Any) -> bool:
        """Say whether this optimizer's parameters have been compared."""
        held = self._counts.get(id(optimizer))
        return held is not None and held[0] == len(parameters_of(optimizer))

    def compare(self, optimizer: Any, scaler: "Contract") -> None:
        """Ask all ranks what they hold.  Reads on the host; all ranks come here."""
        params = parameters_of(optimizer)
        counts = _holders(params, scaler)
        found = {id(param): n for param, n in zip(params, counts, strict=True)}
        self._counts[id(optimizer)] = (len(params), found)
        self._weights.pop(id(optimizer), None)

    def weights(self, optimizer: Any, home: torch.device) -> torch.Tensor:
        """Give each gradient's share in a sum over all ranks.  float64 [n]."""
        ids = tuple(map(id, owners(optimizer)))
        held = self._weights.get(id(optimizer))
        if held is None or held[0] != ids or held[1].device != home:
            counts = self._counts[id(optimizer)][1]
            shares = [1.0 / counts[key] for key in ids]
            held = (ids, torch.tensor(shares, dtype=torch.float64, device=home))
            self._weights[id(optimizer)] = held
        return held[1]


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
    if not shares.known(optimizer):
        scaler._settle(record)
        if _skipped(record, home):
            return torch.full((), torch.inf, dtype=torch.float32, device=home)
        shares.compare(optimizer, scaler)
    power = torch.zeros((), dtype=torch.float64, device=home)
    if gathered.grads:
        weights = shares.weights(optimizer, home)
        power = _power(gathered, seen.parts, order, weights)
    total = ask_norm(scaler, power, present=True)
    scaler._settle(record)
    whole, there = total.wait()
    everybody = math.prod(group.size() for group in scaler._ranks.groups())
    norm: torch.Tensor = (whole * (everybody / there)).pow(1.0 / order)
    return norm


def ask_norm(scaler: "Contract", power: torch.Tensor, *, present: bool) -> Answer:
    """Send off a sum of powers, and whether this rank has gradients to count at all."""
    scaler._ranks.note("norm")
    both = torch.stack([power, torch.full_like(power, float(present))])
    return scaler._ranks.ask(both, dist.ReduceOp.SUM)


def _power(
    gathered: Gathered,
    parts: tuple[torch.Tensor, ...],
    order: float,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Sum the norms' powers up, each by its share; finite if the gradients are."""
    home = weights.device
    sizes = torch.stack([part.to(home).double() for part in parts])
    power = torch.dot(sizes.pow(order), weights)
    found = survey.seen_by_host(power.float())
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


# -- comparing ------------------------------------------------------------------------


def _holders(params: list[torch.Tensor], scaler: "Contract") -> list[int]:
    """Count, for each parameter, the ranks that hold the same part."""
    ranks = scaler._ranks
    rows = [_looks(param, place) for place, param in enumerate(params)]
    number = _hashed([row[0] for row in rows])
    size = math.sqrt(sum(row[1] ** 2 for row in rows))
    numbers = [number, -number, size, -size, float(len(rows))]
    own = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    high, low, most, least, longest = ranks.largest(own).tolist()
    if high == -low and most + least <= _CLOSE * most:
        return [math.prod(group.size() for group in ranks.groups())] * len(rows)
    blank = [(math.nan,) * 3] * (int(longest) - len(rows))
    table = torch.tensor([*rows, *blank], dtype=torch.float64, device="cpu")
    return _counted(rows, ranks.gather(table).tolist())


def _counted(
    own: list[tuple[float, float, float]], tables: list[list[list[float]]]
) -> list[int]:
    """Count the ranks in whose table each of our parts appears."""
    by_key: dict[float, list[tuple[int, float, float]]] = defaultdict(list)
    for rank, table in enumerate(tables):
        for key, size, total in table:
            by_key[key].append((rank, size, total))
    counts = []
    for key, size, total in own:
        close = _CLOSE * size
        same = {
            rank
            for rank, other, another in by_key[key]
            if abs(other - size) <= close and abs(another - total) <= close
        }
        counts.append(max(1, len(same)))
    return counts


def _looks(param: torch.Tensor, place: int) -> tuple[float, float, float]:
    """Describe a part: a number for its content, its gradient's norm and sum."""
    part = backend.local(param.detach())
    content, constant = _content(part)
    where = _coordinates(param)
    # Zeros and ones look the same everywhere; then it counts where they stand.
    key = (content, str(part.dtype), *part.shape, *where, place if constant else -1)
    grad = local_grad(param)
    if grad is None or grad.numel() == 0:
        return _hashed(key), 0.0, 0.0
    wide = grad.double()
    size, total = backend.read([torch.linalg.vector_norm(wide), wide.sum()])
    return _hashed(key), size, total


def _content(part: torch.Tensor) -> tuple[tuple[int, ...], bool]:
    """Sum a tensor's bits up, some of them weighted by where they stand."""
    flat = torch.view_as_real(part).flatten() if part.is_complex() else part.flatten()
    if flat.numel() == 0:
        return (), True
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = flat.view(kinds[flat.element_size()])
    ends = torch.cat([bits[:_SAMPLE], bits[-_SAMPLE:]]).long()
    order = torch.arange(1, ends.numel() + 1, dtype=torch.int64, device=ends.device)
    sums = torch.stack([bits.sum(dtype=torch.int64), (ends * order).sum()])
    return tuple(sums.tolist()), bool((bits == bits[0]).all())


def _coordinates(param: Any) -> tuple[Any, ...]:
    """Tell which shard of a DTensor this rank holds; replicas hold the same."""
    mesh = getattr(param, "device_mesh", None)
    if mesh is None:
        return ()
    at = mesh.get_coordinate() or ()
    return tuple(
        (str(placement), index)
        for placement, index in zip(param.placements, at, strict=True)
        if not placement.is_replicate()
    )


def _hashed(key: Any) -> float:
    """Make a whole number of 52 bits, the same in every process."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return float(int.from_bytes(digest, "big") >> 12)
