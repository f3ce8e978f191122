"""Ranks that share one scale: combine their findings by all-reduce.

Every rank sends one small vector before it clips or steps: one MAX all-reduce.  It also
says what the rank is about to do, so that no rank applies a step while others do
something else.  A number that must be equal on all ranks is sent with its negative: the
two maxima show whether it is.  Clipping adds a SUM over all ranks if they share
parameters (DTensor, FSDP), and sums over smaller process groups with one more MAX if
only some ranks hold a parameter.

The host reads only its own memory.  On other devices, ranks that differ skip the step
(`found` is 1), and `Agreed.differs` reports it once it is read.
"""

import math
from collections import Counter
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from buoy._backends import torch as backend
from buoy._backends.torch import collectives
from buoy._backends.torch import rank_norms as norms
from buoy._backends.torch.collectives import NormGroup, ProcessGroups, Ranks, code_of
from buoy._backends.torch.rank_norms import LocalNorm, RankGradients
from buoy._core.errors import RankMismatchError
from buoy._core.step import MEASUREMENTS
from buoy.torch.loss_check import LOSS

__all__ = ["Agreed", "Agreement", "Findings", "late_error"]

_TURNS = 2**24  # float32 counts no further
_MAX, _SUM = dist.ReduceOp.MAX, dist.ReduceOp.SUM


class Findings(NamedTuple):
    """The findings of one rank.  Tensors are 0-d and on the scale's device."""

    found: torch.Tensor  # float32: 1 if a gradient is not finite
    measured: dict[str, torch.Tensor]  # by `_MEASURED`, as far as they are due
    scale: torch.Tensor  # must be equal on all ranks, as the next two
    tracker: torch.Tensor
    turn: int
    has_grads: bool = True
    has_loss: bool = True
    clipped: bool = False  # gradients are clipped while they are scaled
    norm: LocalNorm | None = None  # when clipping


class Agreed(NamedTuple):
    """The combined findings of all ranks."""

    found: torch.Tensor  # 1 also if ranks differ and the host has not read it
    measured: dict[str, torch.Tensor]
    has_grads: bool  # of any rank; True if the host cannot read it
    has_loss: bool
    clipped: torch.Tensor  # float32 []: more than 0 if any rank has noticed it
    norm: torch.Tensor | None = None  # float32: of all ranks' gradients
    # If the host cannot read whether ranks differ: 1 if they do, and the function that
    # makes the error, which all ranks must call together (see also `late_error`).
    differs: torch.Tensor | None = None
    mismatch: Callable[[], RankMismatchError] | None = None


# The vector that is sent: numbers to combine, numbers that must be equal, the negatives
# of the latter; when clipping also six numbers of the norm (see `norms.message`).
_MEASURED = (*MEASUREMENTS, LOSS)
_FOUND, _END = 0, 1 + len(_MEASURED)
_EQUAL = slice(_END, _END + 5)  # scale, tracker, turn, order and rounds of the norm
_HAS, _CLIPPED = slice(_END + 5, _END + 7), _END + 7
_NEGATIVE, _NORM = slice(_END + 8, _END + 13), slice(_END + 13, _END + 19)


class _Exchange:
    """One rank's part in combining the findings of all."""

    def __init__(self, ranks: Ranks, findings: Findings, doing: str) -> None:
        self._ranks, self._findings, self._doing = ranks, findings, doing
        norm, home = findings.norm, findings.scale.device
        self._sums = torch.zeros(3, dtype=torch.float64, device=home)  # of replicas
        if norm is not None and not norm.rounds & norms.GROUPED:
            self._sums = norm.plain

    def _vector(self) -> torch.Tensor:
        mine, equal = self._findings, self._equal()
        zero = torch.zeros_like(mine.found)
        seen = [mine.found.clamp(max=1.0)]
        for name in _MEASURED:
            number = mine.measured.get(name)
            seen.append(zero if number is None else _ordered(number))
        numbers = [number.float().reshape(()) for number in (*seen, *equal[:2])]
        flags = mine.has_grads, mine.has_loss, mine.clipped
        rest = [*equal[2:], *map(float, flags)]
        tail = torch.tensor(rest, dtype=torch.float32, device="cpu")
        tail = tail.to(mine.scale.device, non_blocking=True)
        both = torch.cat([torch.stack(numbers), tail])
        vector = torch.cat([both, both[_EQUAL].neg()])
        if mine.norm is None:
            return vector
        return torch.cat([vector, norms.message(self._sums, mine.norm.order)])

    def _equal(self) -> tuple[Any, Any, float, float, float]:
        """Return the numbers that must be equal on all ranks."""
        mine, norm = self._findings, self._findings.norm
        order = 0.0 if norm is None or norm.order == math.inf else norm.order
        rounds = 0.0 if norm is None else float(norm.rounds)
        return mine.scale, mine.tracker, float(mine.turn % _TURNS), order, rounds

    def agreed(self) -> Agreed:
        """Wait for the other ranks; with NCCL only the device waits."""
        vector, gap = self._ranks.reduce(self._doing, self._vector(), _MAX).wait()
        gap = gap + (vector[_EQUAL] + vector[_NEGATIVE]).sum()
        norm, whole = self._findings.norm, None
        if norm is None:
            differs = self._refused(gap != 0)
        else:
            agreed, finite = vector[_NORM], vector[_FOUND] == 0
            differs = self._refused((gap != 0) | (norms.differ(agreed) & finite))
            whole, late = self._whole(norm, agreed, finite)
            differs = torch.maximum(differs, late)
        seen = backend.in_host_memory(vector)
        grads, loss = backend.values(vector[_HAS]) if seen else (1.0, 1.0)
        return Agreed(
            torch.maximum(vector[_FOUND], differs),
            {
                name: _measured(name, vector[place])
                for place, name in enumerate(_MEASURED, 1)
                if name in self._findings.measured
            },
            bool(grads),
            bool(loss),
            vector[_CLIPPED],
            whole,
            *(() if seen else (differs, self.mismatch)),
        )

    def _whole(
        self, norm: LocalNorm, agreed: torch.Tensor, finite: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm over all ranks, and whether their replicas differ.

        All ranks call this with the same `rounds`; otherwise all have raised.
        """
        shared, differs = norm.shared, torch.zeros_like(agreed[0])
        if norm.rounds & norms.SUMMED:
            shared, _ = self._ranks.reduce("parts", norm.shared, _SUM).wait()
        if norm.rounds & norms.GROUPED:
            self._sums = _added_up(norm)
            replicas = norms.message(self._sums, norm.order)
            agreed, gap = self._ranks.reduce("parts", replicas, _MAX).wait()
            differs = self._refused((gap != 0) | (norms.differ(agreed) & finite))
        return norms.total(agreed, shared, norm.order), differs

    def _refused(self, differs: torch.Tensor) -> torch.Tensor:
        """Raise if ranks differ and the host can read it; else return 1 or 0."""
        number = differs.float()
        if backend.in_host_memory(number) and backend.read_host_memory(number):
            raise self.mismatch()
        return number

    def mismatch(self) -> RankMismatchError:
        """Gather the state of all ranks; return an error that names those that differ.

        Reads on the host.  A collective: all ranks must call it.
        """
        scale, tracker, _, order, rounds = self._equal()
        state = [scale.item(), float(self._findings.turn), tracker.item()]
        how = [code_of(self._doing), order, rounds]
        return _mismatch(self._ranks, [*how, *state, *self._sums.tolist()])


def _mismatch(ranks: Ranks, own: list[float]) -> RankMismatchError:
    """Gather the calls and states of all ranks; return the error."""
    table = ranks.gather(torch.tensor(own, dtype=torch.float64, device="cpu")).tolist()
    rows = dict(zip(ranks.members(), table, strict=True))
    if len({row[0] for row in table}) > 1:
        return collectives.different_calls({rank: row[0] for rank, row in rows.items()})
    held = {rank: (row[3], int(row[4]), int(row[5])) for rank, row in rows.items()}
    if len(set(held.values())) > 1:
        return _different_states(held)
    if len({(*row[1:3],) for row in table}) > 1:
        return RankMismatchError(_DIFFERENT_ROUNDS)
    code, order, _, scale = own[:4]
    unit = scale if code == code_of("clip") else 1.0
    sizes = {
        rank: (row[6] ** (1.0 / order) / unit, int(row[8]))
        for rank, row in rows.items()
        if row[8]
    }
    return norms.different_norms(sizes)


def _measured(name: str, number: torch.Tensor) -> torch.Tensor:
    """Return a measurement; a share that some rank did not measure is NaN."""
    if name.endswith("_log2"):
        return number
    return torch.where(number < torch.inf, number, torch.nan)


def _ordered(number: torch.Tensor) -> torch.Tensor:
    """Replace NaN, for which MAX is not defined, by inf."""
    return torch.nan_to_num(number, nan=torch.inf, posinf=torch.inf)


def _added_up(norm: LocalNorm) -> torch.Tensor:
    """Sum shards to parameters, then parts to the model.  float64 [3].

    Level by level, so that all ranks use the process groups in the same order and
    cannot deadlock.
    """
    op = _MAX if norm.order == math.inf else _SUM
    sums = [part.sums for part in norm.parts]
    for level in range(max((len(part.shards) for part in norm.parts), default=0)):
        sent = {
            place: Ranks([part.shards[level]]).reduce("parts", sums[place], op)
            for place, part in enumerate(norm.parts)
            if level < len(part.shards)
        }
        for place, reduction in sent.items():
            sums[place], _ = reduction.wait()
    totals: dict[Any, torch.Tensor] = {None: norm.plain}
    for part, some in zip(norm.parts, sums, strict=True):
        before = totals.get(part.group, torch.zeros_like(some))
        totals[part.group] = norms.merged(before, some, norm.order)
    whole = totals.pop(None)
    groups = sorted(totals, key=attrgetter("group_name"))
    for reduction in [Ranks([g]).reduce("parts", totals[g], op) for g in groups]:
        whole = norms.merged(whole, reduction.wait()[0], norm.order)
    return whole


class Agreement:
    """The ranks that share one scale.

    By default all ranks of torch.distributed, once it is initialised: ranks that train
    one model step together, however its parameters are distributed.
    """

    def __init__(
        self, process_group: ProcessGroups = None, norm_group: NormGroup = None
    ) -> None:
        self.ranks = Ranks(process_group)
        self._norm_group: Any = norm_group
        if norm_group is not None and not callable(norm_group):
            group = collectives.checked_group("norm_group", norm_group)
            self._norm_group = Ranks([group])

    @property
    def active(self) -> bool:
        """Whether there are other ranks to agree with."""
        return bool(self.ranks.groups())

    def measure(
        self, seen: RankGradients, model: torch.nn.Module | None = None
    ) -> LocalNorm:
        """Return this rank's norm, by how the parameters are distributed.

        Raises OptionError if that is unknown without `model`.
        """
        group = self._norm_group
        if isinstance(group, Ranks):  # no sum over a process group of one rank
            group = (*group.groups(), None)[0]
        return norms.local_norm(seen, self.ranks.members(), group, model)

    def introduce(self, *, foresees: bool, wait: bool) -> None:
        """Compare, once per scaler, whether the policies of ranks look at the loss.

        Such a policy waits for all ranks before the backward pass, where a rank with
        another policy would never join.  Raises RankMismatchError.  Without `wait`,
        other ranks learn of this one, but it does not compare.
        """
        doing = "loss" if foresees else "agree"
        found = self.ranks.post("policy", doing, wait=wait)
        if wait and len(set(found.values())) > 1:
            raise collectives.different_calls(
                {rank: code_of(one) for rank, one in found.items()}
            )

    def agree(self, findings: Findings, *, doing: str | None = None) -> Agreed:
        """Combine this rank's findings with those of all ranks.

        `doing` is "agree" or, with a norm, "clip"; "norm" or "largest" for gradients
        that are already unscaled.  Raises RankMismatchError if ranks differ and the
        host can read it, and AbsentRankError if some ranks did not take part.
        """
        usual = "agree" if findings.norm is None else "clip"
        return _Exchange(self.ranks, findings, doing or usual).agreed()

    def largest(self, number: torch.Tensor, doing: str) -> torch.Tensor:
        """Return the largest of all ranks' numbers; this waits."""
        if not self.active:
            return number
        most, gap = self.ranks.reduce(doing, _ordered(number), _MAX).wait()
        if backend.in_host_memory(gap) and backend.read_host_memory(gap):
            raise _mismatch(self.ranks, [code_of(doing), *[0.0] * 8])
        return most

    def __reduce__(self) -> Any:
        # Process groups cannot be pickled: a loaded scaler shares its scale with all
        # ranks, or with none if that was so before.
        return Agreement, ((),) if self.ranks._given == [] else ()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Agreement":
        return self


# -- errors ---------------------------------------------------------------------------

_CURE = "Load the same checkpoint on every rank and call `update` equally often."
_DIFFERENT_ROUNDS = (
    "Ranks clip in different ways: by another `norm_type`, with a `norm_group` on some "
    "of them only, or with parameters that only some of them shard. Their norms cannot "
    "be combined, so nothing was applied. Pass the same options on every rank; a "
    "callable `norm_group` must assign parameters to a group on each of its ranks."
)


def _different_states(held: dict[int, tuple[float, int, int]]) -> RankMismatchError:
    """Return the error that names the ranks whose state differs from the majority."""
    usual, _ = Counter(held.values()).most_common(1)[0]
    others = [rank for rank in sorted(held) if held[rank] != usual]
    shown = "; ".join(f"rank {rank} has {_state(held[rank])}" for rank in others[:8])
    more = f"; {len(others) - 8} more ranks differ" if len(others) > 8 else ""
    return RankMismatchError(
        f"Ranks hold different scales: {shown}{more}; the other "
        f"{len(held) - len(others)} of {len(held)} have {_state(usual)}. Gradients "
        "would be divided by scales that they were not multiplied by; nothing was "
        f"applied. {_CURE}",
        held,
    )


def _state(values: tuple[float, int, int]) -> str:
    scale, turn, count = values
    return f"scale {scale:g} after {turn} updates ({count} clean steps)"


def late_error(scale: float) -> RankMismatchError:
    """Return the error for ranks that differed some steps ago, found by a late read."""
    return RankMismatchError(
        f"Ranks hold different scales or counters, this one a scale of {scale:g}, or "
        "clip by gradients that differ between them. The steps since then were skipped "
        f"on every rank; nothing was applied. {_CURE} Gradients must be averaged "
        "(DDP) or belong to a `norm_group`; see docs/guides/distributed.md."
    )
