"""Which ranks hold the same part of a model: found out by comparing, once.

Plain parameters do not tell whether they are replicas or shards; their contents and
gradients, of all ranks together, do.
"""

import hashlib
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from buoy._backends import torch as backend
from buoy.torch.gather import local_grad, owners, parameters_of

if TYPE_CHECKING:
    from buoy.torch.contract import Contract

__all__ = ["Shares"]

_CLOSE = 1e-3  # replicas' gradients may be summed up in another order
_SAMPLE = 4096  # elements at either end whose order is looked at


class _Row(NamedTuple):
    """What a part looks like: a number for its content, its gradient's norm and sum."""

    key: float
    size: float = 0.0
    total: float = 0.0
    blank: float = 0.0  # 1 if only a gradient to come will tell it from its like


class _Found(NamedTuple):
    """What a comparison showed."""

    counts: list[int]  # of ranks that hold the same, for each parameter
    doubts: set[int]  # of them, those that only gradients to come will tell apart
    open: bool  # some rank has such doubts
    base: float  # ranks that took part with parameters of theirs


class _Held(NamedTuple):
    """What is known of an optimizer, as long as it and its parameters are the same."""

    optimizer: Callable[[], Any]
    params: Sequence[Callable[[], Any]]
    found: _Found

    def of(self, optimizer: Any) -> bool:
        """Say whether this is about that optimizer, with these parameters."""
        if self.optimizer() is not optimizer:
            return False
        params, known = parameters_of(optimizer), [ref() for ref in self.params]
        return len(params) == len(known) and all(map(is_, params, known))


class Shares:
    """How many ranks hold each parameter, found out once per set of parameters."""

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}
        self._weights: dict[int, tuple[tuple[int, ...], torch.Tensor]] = {}

    def known(self, optimizer: Any) -> bool:
        """Say whether this optimizer's parameters have been compared."""
        held = self._held.get(id(optimizer))
        return held is not None and held.of(optimizer)

    def certain(self, optimizer: Any) -> bool:
        """Say whether they have, on every rank with nothing left to be seen."""
        return self.known(optimizer) and not self._held[id(optimizer)].found.open

    def doubted(
        self, optimizer: Any, parts: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Pick, of something per gradient, what belongs to doubtful parameters."""
        found = self._held[id(optimizer)].found
        if not found.doubts:
            return []
        params = parameters_of(optimizer)
        doubtful = {id(params[place]) for place in found.doubts}
        mine = zip(owners(optimizer), parts, strict=True)
        return [part for param, part in mine if id(param) in doubtful]

    def base(self, optimizer: Any) -> float:
        """Tell how many ranks the shares were counted over."""
        return self._held[id(optimizer)].found.base

    def compare(self, optimizer: Any, scaler: "Contract") -> None:
        """Ask all ranks what they hold.  Reads on the host; all ranks come here."""
        params = parameters_of(optimizer)
        found = _compared(params, scaler, present=True)
        refs = [*map(weakref.ref, params)]
        gone = [key for key, old in self._held.items() if old.optimizer() is None]
        for key in {*gone, id(optimizer)}:
            self._held.pop(key, None)
            self._weights.pop(key, None)
        self._held[id(optimizer)] = _Held(_reference(optimizer), refs, found)

    def listen(self, scaler: "Contract") -> None:
        """Be there while others compare."""
        _compared([], scaler, present=False)

    def weights(self, optimizer: Any, home: torch.device) -> torch.Tensor:
        """Give each gradient's share in a sum over all ranks.  float64 [n]."""
        ids = tuple(map(id, owners(optimizer)))
        kept = self._weights.get(id(optimizer))
        if kept is None or kept[0] != ids or kept[1].device != home:
            counts = self._held[id(optimizer)].found.counts
            params = zip(parameters_of(optimizer), counts, strict=True)
            by_id = {id(param): count for param, count in params}
            shares = [1.0 / by_id[key] for key in ids]
            kept = (ids, torch.tensor(shares, dtype=torch.float64, device=home))
            self._weights[id(optimizer)] = kept
        return kept[1]


def _reference(thing: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(thing)
    except TypeError:  # a wrapper with slots: its place in memory must not be reused
        return lambda: thing


def _compared(
    params: list[torch.Tensor], scaler: "Contract", *, present: bool
) -> _Found:
    """Count, for each parameter, the ranks that hold the same part."""
    ranks = scaler._ranks
    everybody = ranks.count()
    rows = [_looks(param, place, everybody) for place, param in enumerate(params)]
    number = _hashed([(row.key, row.blank) for row in rows])
    size = math.sqrt(sum(row.size**2 for row in rows))
    total = sum(row.total for row in rows)
    numbers = [number, -number, size, -size, total, -total, float(len(rows))]
    own = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    high, low, most, least, top, bottom, longest = ranks.largest(
        "compare", own
    ).tolist()
    near = _CLOSE * most
    if high == -low and most > 0.0 and max(most + least, top + bottom) <= near:
        blank = {place for place, row in enumerate(rows) if row.blank}
        return _Found([everybody] * len(rows), blank, bool(blank), everybody)
    gap = [_Row(math.nan, math.nan, math.nan)] * (int(longest) - len(rows))
    table = [_Row(float(present)), *rows, *gap]
    wide = torch.tensor(table, dtype=torch.float64, device="cpu")
    first, *others = zip(*ranks.gather(wide).tolist(), strict=True)
    there = sum(key for key, *_ in first)
    return _counted(rows, [[_Row(*row) for row in some] for some in others], there)


def _counted(own: list[_Row], columns: list[list[_Row]], there: float) -> _Found:
    """Count the ranks in whose table each of our parts appears."""
    by_key: dict[float, list[tuple[int, _Row]]] = defaultdict(list)
    for column in columns:
        for rank, row in enumerate(column):
            by_key[row.key].append((rank, row))
    blanks = {
        key
        for key, some in by_key.items()
        if len({rank for rank, row in some if row.blank}) > 1
    }
    alike = [
        {rank for rank, row in by_key[mine.key] if _same(row, mine)} for mine in own
    ]
    return _Found(
        [max(1, len(some)) for some in alike],
        {place for place, mine in enumerate(own) if mine.blank and mine.key in blanks},
        bool(blanks),
        there,
    )


def _same(one: _Row, other: _Row) -> bool:
    close = _CLOSE * other.size
    return abs(one.size - other.size) <= close and abs(one.total - other.total) <= close


def _looks(param: torch.Tensor, place: int, everybody: int) -> _Row:
    """Describe a part."""
    part = backend.local(param.detach())
    content, constant = _content(part)
    where = _coordinates(param)
    # Zeros and ones look the same everywhere; then it counts where they stand.
    key = (content, str(part.dtype), *part.shape, *where, place if constant else -1)
    grad = local_grad(param)
    size = total = 0.0
    if grad is not None and grad.numel():
        wide = grad.double()
        size, total = torch.stack([torch.linalg.vector_norm(wide), wide.sum()]).tolist()
    mesh = getattr(param, "device_mesh", None)
    told = mesh is not None and mesh.size() == everybody  # its placement says it all
    blank = param.requires_grad and part.numel() and not size and not told
    return _Row(_hashed(key), size, total, float(bool(blank)))


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
