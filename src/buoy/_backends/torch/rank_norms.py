"""The norm of a model's gradients over ranks, from the layout of each parameter.

| parameter | how it enters the norm |
|---|---|
| a DTensor on a mesh of the scaler's ranks | SUM over all ranks / copies |
| another DTensor | SUM over the dimensions that shard it, then as plain |
| a parameter of FullyShardedDataParallel | the same, by its unit's process group |
| plain, with a `norm_group` | SUM over that process group, then as a replica |
| any other | a replica: all ranks must have the same norm |

If the replicas of ranks differ, all get an error.  The norm of order inf is the largest
of all parts, and needs no comparison.  This module computes; `distributed` sends.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from buoy._backends import torch as backend
from buoy._backends.torch.collectives import Group, NormGroup, checked_group, ranks_of
from buoy._core.errors import OptionError, RankMismatchError

__all__ = [
    "LocalNorm",
    "RankGradients",
    "differ",
    "different_norms",
    "local_norm",
    "merged",
    "message",
    "total",
]

# Replicas whose sums have different orders differ by up to 5e-4 (BF16).
_CLOSE = 1e-3
_COUNTS = 2**24  # float32 counts no further
# What follows the MAX, as flags:
SUMMED = 1  # a SUM over all ranks
GROUPED = 2  # SUMs over process groups


class RankGradients(NamedTuple):
    """An optimizer's gradients and their norms, on one rank."""

    params: Sequence[torch.Tensor]  # all of the optimizer: they determine the messages
    owners: Sequence[torch.Tensor]  # those of them that have a gradient
    grads: Sequence[torch.Tensor]  # this rank's parts of the gradients, dense and real
    norms: (
        Sequence[torch.Tensor] | torch.Tensor
    )  # of each; inf if its powers overflowed
    order: float  # positive, inf included
    total: torch.Tensor  # the norm of all, or an upper bound; finite if they are


class Part(NamedTuple):
    """The sums over this rank's gradients of one layout."""

    shards: tuple[Group, ...]  # sum over these process groups for whole parameters
    group: Group | None  # then over this process group for the whole model
    sums: torch.Tensor  # float64 [3]: powers of norms, fourth powers, elements


class LocalNorm(NamedTuple):
    """One rank's contribution to the norm."""

    order: float
    total: torch.Tensor  # float []: of this rank's gradients alone
    plain: torch.Tensor  # float64 [3], as `Part.sums`: of replicas
    shared: torch.Tensor  # float64 []: powers of parts that all ranks share
    parts: tuple[Part, ...]  # in an order that is the same on every rank
    rounds: int  # SUMMED, GROUPED, both or 0; the same on every rank


class _Layout(NamedTuple):
    """How one parameter is distributed over the ranks."""

    shards: tuple[Group, ...] = ()
    group: Group | None = None
    copies: int = 0  # ranks that hold each part, if all ranks share the parameter


def local_norm(
    seen: RankGradients,
    ranks: Iterable[int],
    norm_group: NormGroup = None,
    model: torch.nn.Module | None = None,
) -> LocalNorm:
    """Sum this rank's norms by the layouts of the parameters.

    The units of FullyShardedDataParallel are searched in `model`.
    """
    order = seen.order
    everyone = frozenset(ranks)
    units = cache(partial(_units, model))
    layouts = [_layout(param, everyone, units) for param in seen.params]
    if order == math.inf:
        layouts = [_Layout(layout.shards) for layout in layouts]
        norm_group = None
    if norm_group is not None:
        layouts = list(map(partial(_grouped, norm_group), seen.params, layouts))
    places: dict[_Layout, list[int]] = {layout: [] for layout in layouts}
    if norm_group is not None and not callable(norm_group):
        places.setdefault(_Layout(group=norm_group), [])  # a rank without parameters
    by_id = dict(zip(map(id, seen.params), layouts, strict=True))
    for place, param in enumerate(seen.owners):
        places[by_id[id(param)]].append(place)
    sizes = _sizes(seen)
    counts = [backend.local(param).numel() for param in seen.owners]
    sums = {
        layout: _sums(sizes, counts, some, order) for layout, some in places.items()
    }
    none = torch.zeros(3, dtype=torch.float64, device=seen.total.device)
    plain = sums.pop(_Layout(), none)
    shared = [sums[layout][0] / layout.copies for layout in sums if layout.copies]
    parts = [Part(*layout[:2], sums[layout]) for layout in sums if not layout.copies]
    grouped = bool(parts) or norm_group is not None
    return LocalNorm(
        order,
        seen.total,
        plain,
        torch.stack(shared).sum() if shared else none[0],
        tuple(sorted(parts, key=_names)),
        SUMMED * bool(shared) | GROUPED * grouped,
    )


def _grouped(norm_group: Any, param: torch.Tensor, layout: _Layout) -> _Layout:
    """Add the process group of `norm_group` to the layout of a parameter."""
    if layout.copies:
        return layout
    group = norm_group(param) if callable(norm_group) else norm_group
    if group is None or checked_group("norm_group", group).size() == 1:
        return layout
    return layout._replace(group=group)


def _names(part: Part) -> list[str]:
    """Return the sort key of parts: names of process groups are equal on all ranks."""
    groups = (*part.shards, part.group)
    return [group.group_name for group in groups if group is not None]


def _sizes(seen: RankGradients) -> torch.Tensor:
    """Return the norms, finite if the gradients are.  float64 [n]."""
    home = seen.total.device
    norms = seen.norms
    if not len(norms):
        return torch.zeros(0, dtype=torch.float64, device=home)
    sizes = torch.stack([norm.to(home, non_blocking=True).double() for norm in norms])
    total = backend.known(sizes.sum().float())
    if total is None:
        # If the powers of a finite gradient overflow, use the upper bound.
        return torch.where(backend.nonfinite(sizes), seen.total.double(), sizes)
    if math.isfinite(total):
        return sizes
    exact = partial(torch.linalg.vector_norm, ord=seen.order, dtype=torch.float64)
    return torch.stack([exact(grad).to(home) for grad in seen.grads])


def _sums(
    sizes: torch.Tensor, counts: list[int], places: list[int], order: float
) -> torch.Tensor:
    """Return the sums of norms' powers, fourth powers and numbers of elements."""
    if not places:
        return torch.zeros(3, dtype=torch.float64, device=sizes.device)
    if len(places) < len(counts):
        sizes = torch.stack([sizes[place] for place in places])
    power = sizes.max() if order == math.inf else sizes.pow(order).sum()
    count = float(sum(counts[place] for place in places))
    return torch.stack([power, sizes.pow(4).sum(), torch.full_like(power, count)])


def merged(one: torch.Tensor, other: torch.Tensor, order: float) -> torch.Tensor:
    """Combine the sums of two parts."""
    return torch.maximum(one, other) if order == math.inf else one + other


def message(sums: torch.Tensor, order: float) -> torch.Tensor:
    """Return the numbers that compare replicas, with their negatives.  float32 [6].

    Norms, not powers, which overflow float32.  The norm of order 4 distinguishes parts
    that have the same norm by chance.  A rank without gradients sends -inf.
    """
    power, quartic, count = sums
    if order == math.inf:
        both = torch.full((6,), -torch.inf, dtype=torch.float32, device=sums.device)
        both[0] = power
    else:
        numbers = [power.pow(1.0 / order), quartic.pow(0.25), count.remainder(_COUNTS)]
        half = torch.stack(numbers).float()
        both = torch.cat([half, -half])
    both = both.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    return torch.where(count == 0, -torch.inf, both)


def differ(agreed: torch.Tensor) -> torch.Tensor:
    """Return whether ranks hold different replicas, from the MAX of their messages.

    False if anything is non-finite: that step is skipped anyway.
    """
    most = agreed[:3]
    least = -agreed[3:]
    norms = (most - least)[:2] > _CLOSE * most[:2]
    counts = most[2] > least[2]
    return (most[0] < torch.inf) & (norms.any() | counts)


def total(agreed: torch.Tensor, shared: torch.Tensor, order: float) -> torch.Tensor:
    """Combine the norm of replicas and the sum of all ranks' parts.  float32 []."""
    replicas = agreed[0].double().clamp(min=0.0)  # -inf where no rank has any
    if order == math.inf:
        return torch.maximum(replicas, shared).float()
    norm: torch.Tensor = (replicas.pow(order) + shared).pow(1.0 / order)
    return norm.float()


# -- the layout of a parameter ---------------------------------------------------------


def _layout(
    param: Any, ranks: frozenset[int], units: Callable[[], dict[int, Any]]
) -> _Layout:
    if getattr(param, "device_mesh", None) is not None:
        return _dtensor(param, ranks)
    if not getattr(param, "_fsdp_flattened", False):
        return _Layout()
    unit = units().get(id(param))
    return _flat(param, ranks) if unit is None else _unit(unit, ranks)


_MESHES: "WeakKeyDictionary[Any, frozenset[int]]" = WeakKeyDictionary()


def _dtensor(param: Any, ranks: frozenset[int]) -> _Layout:
    mesh = param.device_mesh
    if mesh not in _MESHES:  # cached: this reads a CPU tensor
        _MESHES[mesh] = frozenset(mesh.mesh.flatten().tolist())
    placements = getattr(param.grad, "placements", param.placements)
    whole = [placement.is_replicate() for placement in placements]
    if _MESHES[mesh] == ranks:
        sizes = zip(mesh.shape, whole, strict=True)
        return _Layout(copies=math.prod(size for size, same in sizes if same))
    groups = [mesh.get_group(dim) for dim, same in enumerate(whole) if not same]
    return _Layout(shards=tuple(group for group in groups if group.size() > 1))


def _units(model: torch.nn.Module | None) -> dict[int, Any]:
    """Map each parameter of FSDP1 to its innermost unit, which comes last."""
    from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: PLC0415 - slow

    units = [] if model is None else FullyShardedDataParallel.fsdp_modules(model)
    return {id(param): unit for unit in units for param in unit.parameters()}


def _unit(unit: Any, ranks: frozenset[int]) -> _Layout:
    if unit.sharding_strategy.name == "NO_SHARD" or unit.process_group.size() == 1:
        return _Layout()
    if frozenset(ranks_of(unit.process_group)) == ranks:
        return _Layout(copies=1)
    return _Layout(shards=(unit.process_group,))


def _flat(param: Any, ranks: frozenset[int]) -> _Layout:
    """Return the layout of a flat parameter, if its sizes determine it."""
    if getattr(param, "_is_flat_param", False):
        size = param.numel()
        whole = getattr(param, "_padded_unsharded_size", param.shape).numel()
        if whole == size:
            return _Layout()
        everywhere = torch.distributed.get_world_size()
        if whole == size * len(ranks) and len(ranks) == everywhere:
            return _Layout(copies=1)
    raise OptionError(_NEEDS_MODEL)


_NEEDS_MODEL = (
    "A parameter of FullyShardedDataParallel does not say over which ranks it is "
    "sharded, so its part of the global norm is unknown. Pass the wrapped model to the "
    "scaler, `GradScaler(model=model)`; nothing was clipped."
)


def different_norms(held: Mapping[int, tuple[float, int]]) -> RankMismatchError:
    """Return the error that lists the norms of ranks."""
    shown = "; ".join(
        f"rank {rank} has a gradient norm of {norm:g} over {count:,} elements"
        for rank, (norm, count) in sorted(held.items())[:8]
    )
    more = f"; {len(held) - 8} more ranks" if len(held) > 8 else ""
    return RankMismatchError(
        f"Ranks hold different gradients of plain parameters: {shown}{more}. One "
        "global norm needs to know whether they are replicas or parts; nothing was "
        "applied. If each rank holds a part of the model (pipeline stages, experts, "
        "some of the parameters), pass `norm_group=`: the process group over which the "
        "parts add up, or a callable from a parameter to its group (None for a "
        "replica). If each rank holds the whole model, its gradients were not "
        "averaged: wrap it in DistributedDataParallel (DDP). If ranks train apart "
        "(LocalSGD), pass `process_group=()`.",
        held,
    )
