"""Ranks that share one scale: combine their findings by all-reduce.

Every rank sends one small vector before it clips or steps: one MAX all-reduce.  It also
says what the rank is about to do, so that no rank applies a step while others do
something else.  A number that must be equal on all ranks is sent with its negative: the
two maxima show whether it is.  Clipping adds a SUM over all ranks if they share
parameters (DTensor, FSDP), and sums over smaller process groups with one more MAX if
only some ranks hold a parameter.

The host reads only its own memory.  On other devices, ranks that differ skip the step,
and `Pending.differs` reports it once it is read.
"""

import math
from collections import Counter
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from buoy._backends import torch as backend
from buoy._backends.torch import collectives
from buoy._backends.torch import rank_norms as norms
from buoy._backends.torch.collectives import (
    Communicator,
    NormGroup,
    ProcessGroups,
    code_of,
)
from buoy._backends.torch.gradients import parameters_of
from buoy._backends.torch.rank_norms import LocalNorm, RankGradients
from buoy._core.errors import RankMismatchError
from buoy._core.step import MEASUREMENTS
from buoy.torch import errors
from buoy.torch.iteration import Iteration
from buoy.torch.loss_check import LOSS
from buoy.torch.pending import Pending, combined
from buoy.torch.ranks import Alone, Ranks
from buoy.torch.scale import CLIPPED, Measured, Number, Scale

__all__ = ["Sharing", "different_states", "late_error"]

_TURNS = 2**24  # float32 counts no further
_MAX = dist.ReduceOp.MAX
_SUM = dist.ReduceOp.SUM

# The vector that is sent: numbers of which the largest counts, numbers that must be
# equal and their negatives, and when clipping those of the norm (`norms.message`).
_LARGEST = ("found", "has_grads", "has_loss", CLIPPED, *MEASUREMENTS, LOSS)
_EQUAL = ("scale", "tracker", "turn", "order", "rounds")
_END = len(_LARGEST) + 2 * len(_EQUAL)
_ABSENT = -1.0  # below every number of which the largest counts


class Sharing:
    """Who shares one scale: the options `process_group` and `norm_group`.

    By default all ranks of torch.distributed, once it is initialised: ranks that train
    one model step together, however its parameters are distributed.
    """

    def __init__(
        self, process_group: ProcessGroups = None, norm_group: NormGroup = None
    ) -> None:
        self.communicator = Communicator(process_group)
        if norm_group is not None and not callable(norm_group):
            norm_group = collectives.checked_group("norm_group", norm_group)
            self._norm_groups: Communicator | None = Communicator([norm_group])
            self._norm_group_of: Any = None
        else:
            self._norm_groups = None
            self._norm_group_of = norm_group
        self._together = Together(self)

    def ranks(self) -> Ranks:
        """Return the ranks to agree with now."""
        return self._together if self.communicator.groups() else _ALONE

    @property
    def norm_group(self) -> Any:
        """The process group to sum norms over, a callable that finds it, or None."""
        if self._norm_groups is None:
            return self._norm_group_of
        groups = self._norm_groups.groups()
        return groups[0] if groups else None  # no sum over a group of one rank

    def __reduce__(self) -> Any:
        # Process groups cannot be pickled: a loaded scaler shares its scale with all
        # ranks, or with none if that was so before.
        return Sharing, ((),) if self.communicator.is_empty else ()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Sharing":
        return self


_ALONE = Alone()


class Together:
    """Several ranks; every method is a collective, which all ranks must call."""

    several = True

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing
        self._communicator = sharing.communicator

    def introduce(self, *, foresees: bool, in_schedule: bool) -> None:
        """Compare, once per scaler, whether the policies of ranks look at the loss.

        Such a policy waits for all ranks before the backward pass, where a rank with
        another policy would never join.  In a pipeline, where a rank waits for its
        stage, other ranks learn of this one, but it does not compare.
        """
        doing = "loss" if foresees and not in_schedule else "agree"
        found = self._communicator.post("policy", doing, wait=not in_schedule)
        if not in_schedule and len(set(found.values())) > 1:
            raise collectives.different_calls(
                {rank: code_of(one) for rank, one in found.items()}
            )

    def agree(self, pending: Pending, scale: Scale, iteration: Iteration) -> None:
        """Replace an optimizer's findings by those of all ranks."""
        self._exchange(pending, scale, iteration, None, "agree")

    def agree_on_norm(
        self,
        pending: Pending,
        scale: Scale,
        iteration: Iteration,
        *,
        order: float,
        doing: str,
        model: torch.nn.Module | None,
    ) -> torch.Tensor | None:
        """The same; return the norm of all ranks' gradients, None if there are none."""
        gathered: Any = pending.gathered
        survey: Any = pending.survey
        measured = RankGradients(
            params=parameters_of(pending.optimizer),
            owners=gathered.params,
            grads=gathered.grads,
            norms=survey.parts,
            order=order,
            total=survey.norm,
        )
        members = self._communicator.members()
        norm = norms.local_norm(measured, members, self._sharing.norm_group, model)
        return self._exchange(pending, scale, iteration, norm, doing)

    def largest(self, number: torch.Tensor, doing: str) -> torch.Tensor:
        """Return the largest of all ranks' numbers; this waits."""
        most, gap = self._communicator.reduce(doing, _ordered(number), _MAX).wait()
        if backend.known(gap):
            raise _mismatch(self._communicator, _State(code_of(doing)))
        return most

    def largest_loss(
        self, loss: torch.Tensor | None, home: torch.device
    ) -> torch.Tensor | None:
        """Return the largest |loss| of all ranks; ranks without a loss join, too."""
        own = backend.scalar(_ABSENT, home)
        if loss is not None:
            own = backend.scalar(loss.detach(), home).abs()
        agreed = self.largest(own, "loss")
        return None if backend.known(agreed) == _ABSENT else agreed.abs()

    def _exchange(
        self,
        pending: Pending,
        scale: Scale,
        iteration: Iteration,
        norm: LocalNorm | None,
        doing: str,
    ) -> torch.Tensor | None:
        """Send this rank's findings; store those of all, and return their norm."""
        exchange = _Exchange(self._communicator, pending, scale, iteration, norm, doing)
        agreed = exchange.agreed()
        pending.agreed = True
        if not agreed.has_loss:
            raise errors.before_scale("step")
        pending.flags = {agreed.found.device: agreed.found} if agreed.has_grads else {}
        pending.measured = agreed.measured
        if agreed.differs is not None:
            pending.differs = agreed.differs
            pending.mismatch = exchange.mismatch
        return agreed.norm if agreed.has_grads else None


class _Agreed(NamedTuple):
    """The combined findings of all ranks."""

    found: torch.Tensor  # 1 also if ranks differ and the host has not read it
    measured: Measured
    has_grads: bool  # of any rank; True if the host cannot read it
    has_loss: bool
    norm: torch.Tensor | None  # float32: of all ranks' gradients
    differs: torch.Tensor | None  # float32: 1 if ranks differ; None: they do not


class _Exchange:
    """One rank's part in combining the findings of all."""

    def __init__(
        self,
        communicator: Communicator,
        pending: Pending,
        scale: Scale,
        iteration: Iteration,
        norm: LocalNorm | None,
        doing: str,
    ) -> None:
        self._communicator = communicator
        self._norm = norm
        self._doing = doing
        self._checks_loss = iteration.loss_check is not None
        self._wanted = pending.wanted
        self._home = scale.device
        self._sums = torch.zeros(3, dtype=torch.float64, device=self._home)
        if norm is not None and not norm.rounds & norms.GROUPED:
            self._sums = norm.plain  # of replicas
        flag = combined(pending.flags, self._home)
        self._own: dict[str, Number] = {
            "found": 0.0 if flag is None else flag.clamp(max=1.0),
            "has_grads": float(flag is not None),
            "has_loss": float(not iteration.assumed),
            CLIPPED: pending.measured.get(CLIPPED, 0.0),
            LOSS: pending.measured.get(LOSS, _ABSENT),
        }
        self._own |= {name: pending.measured.get(name, 0.0) for name in pending.wanted}
        finite_order = norm is not None and norm.order != math.inf
        self._equal: dict[str, Number] = {
            "scale": scale.tensor,
            "tracker": scale.tracker,
            "turn": float(scale.turn % _TURNS),
            "order": norm.order if norm is not None and finite_order else 0.0,
            "rounds": 0.0 if norm is None else float(norm.rounds),
        }

    def agreed(self) -> _Agreed:
        """Wait for the other ranks; with NCCL only the device waits."""
        numbers, gap, agreed = self._reduced()
        finite = numbers["found"] == 0
        whole = None
        if self._norm is None:
            differs = self._refused(gap != 0)
        else:
            differs = self._refused((gap != 0) | (norms.differ(agreed) & finite))
            whole, late = self._whole(self._norm, agreed, finite)
            differs = torch.maximum(differs, late)
        equal = backend.known(differs) is not None  # else it would have been raised
        # A rank cannot act on what only the device knows: as if there were some.
        return _Agreed(
            found=torch.maximum(numbers["found"], differs),
            measured=self._measured(numbers),
            has_grads=backend.known(numbers["has_grads"]) != 0.0,
            has_loss=backend.known(numbers["has_loss"]) != 0.0,
            norm=whole,
            differs=None if equal else differs,
        )

    def _reduced(self) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
        """Return the largest of all ranks' numbers, by name; 0 if ranks are equal.

        The third are the numbers of the norm.
        """
        most = self._vector([self._own.get(name, 0.0) for name in _LARGEST])
        equal = self._vector([*self._equal.values()])
        vector = torch.cat([most, equal, -equal])
        if self._norm is not None:
            replicas = norms.message(self._sums, self._norm.order)
            vector = torch.cat([vector, replicas])
        sent = self._communicator.reduce(self._doing, vector, _MAX)
        vector, gap = sent.wait()
        largest, smallest = vector[len(_LARGEST) : _END].view(2, len(_EQUAL))
        gap = gap + (largest + smallest).sum()  # by pairs first: each is exactly 0
        numbers = dict(zip(_LARGEST, vector, strict=False))
        return numbers, gap, vector[_END:]

    def _vector(self, numbers: list[Number]) -> torch.Tensor:
        """Return numbers of the host and of devices as one vector, in one copy each."""
        known = [0.0 if isinstance(x, torch.Tensor) else x for x in numbers]
        sent = torch.tensor(known, dtype=torch.float32, device="cpu")
        vector = list(sent.to(self._home, non_blocking=True).unbind())
        for place, number in enumerate(numbers):
            if isinstance(number, torch.Tensor):
                vector[place] = backend.scalar(number, self._home)
        return _ordered(torch.stack(vector))

    def _measured(self, numbers: dict[str, torch.Tensor]) -> Measured:
        """Return the measurements of all ranks."""
        found: Measured = {CLIPPED: numbers[CLIPPED]}
        for name in self._wanted:
            found[name] = numbers[name]
            if not MEASUREMENTS[name].in_log2:
                # A share that some rank could not measure was sent as inf.
                share = numbers[name]
                found[name] = torch.where(share < torch.inf, share, torch.nan)
        if self._checks_loss and backend.known(numbers[LOSS]) != _ABSENT:
            found[LOSS] = numbers[LOSS]
        return found

    def _whole(
        self, norm: LocalNorm, agreed: torch.Tensor, finite: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm over all ranks, and whether their replicas differ.

        All ranks call this with the same `rounds`; otherwise all have raised.
        """
        shared = norm.shared
        differs = torch.zeros_like(agreed[0])
        if norm.rounds & norms.SUMMED:
            shared, _ = self._communicator.reduce("parts", norm.shared, _SUM).wait()
        if norm.rounds & norms.GROUPED:
            self._sums = _added_up(norm)
            replicas = norms.message(self._sums, norm.order)
            agreed, gap = self._communicator.reduce("parts", replicas, _MAX).wait()
            differs = self._refused((gap != 0) | (norms.differ(agreed) & finite))
        return norms.total(agreed, shared, norm.order), differs

    def _refused(self, differs: torch.Tensor) -> torch.Tensor:
        """Raise if ranks differ and the host can read it; else return 1 or 0."""
        number = differs.float()
        if backend.known(number):
            raise self.mismatch()
        return number

    def mismatch(self) -> RankMismatchError:
        """Gather the state of all ranks; return an error that names those that differ.

        Reads on the host.  A collective: all ranks must call it.
        """
        names = ("order", "rounds", "scale", "turn", "tracker")
        state = [backend.read_one(self._equal[name]) for name in names]
        own = _State(code_of(self._doing), *state, *self._sums.tolist())
        return _mismatch(self._communicator, own)


def _ordered(number: torch.Tensor) -> torch.Tensor:
    """Replace NaN, for which MAX is not defined, by inf."""
    return torch.nan_to_num(number, nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)


class _State(NamedTuple):
    """What one rank tells the others after they were found to differ."""

    call: float  # see `code_of`
    order: float = 0.0  # of the norm
    rounds: float = 0.0
    scale: float = 0.0
    turn: float = 0.0
    tracker: float = 0.0
    power: float = 0.0  # the sums of replicas: `rank_norms.Part.sums`
    quartic: float = 0.0
    elements: float = 0.0


def _mismatch(communicator: Communicator, own: _State) -> RankMismatchError:
    """Gather the calls and states of all ranks; return the error."""
    sent = torch.tensor(own, dtype=torch.float64, device="cpu")
    table = communicator.gather(sent).tolist()
    states = [_State(*row) for row in table]
    ranks = dict(zip(communicator.members(), states, strict=True))
    if len({one.call for one in states}) > 1:
        return collectives.different_calls({r: one.call for r, one in ranks.items()})
    held = {
        rank: (one.scale, int(one.turn), int(one.tracker))
        for rank, one in ranks.items()
    }
    if len(set(held.values())) > 1:
        return different_states(held)
    if len({(one.order, one.rounds) for one in states}) > 1:
        return RankMismatchError(_DIFFERENT_ROUNDS)
    unit = own.scale if own.call == code_of("clip") else 1.0
    sizes = {
        rank: (one.power ** (1.0 / own.order) / unit, int(one.elements))
        for rank, one in ranks.items()
        if one.elements
    }
    return norms.different_norms(sizes)


def _added_up(norm: LocalNorm) -> torch.Tensor:
    """Sum shards to parameters, then parts to the model.  float64 [3].

    Level by level, so that all ranks use the process groups in the same order and
    cannot deadlock.
    """
    op = _MAX if norm.order == math.inf else _SUM
    sums = [part.sums for part in norm.parts]
    for level in range(max((len(part.shards) for part in norm.parts), default=0)):
        sent = {
            place: Communicator([part.shards[level]]).reduce("parts", sums[place], op)
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
    started = [
        Communicator([group]).reduce("parts", totals[group], op) for group in groups
    ]
    for reduction in started:
        whole = norms.merged(whole, reduction.wait()[0], norm.order)
    return whole


# -- errors ---------------------------------------------------------------------------

_CURE = "Load the same checkpoint on every rank and call `update` equally often."
_DIFFERENT_ROUNDS = (
    "Ranks clip in different ways: by another `norm_type`, with a `norm_group` on some "
    "of them only, or with parameters that only some of them shard. Their norms cannot "
    "be combined, so nothing was applied. Pass the same options on every rank; a "
    "callable `norm_group` must assign parameters to a group on each of its ranks."
)


def different_states(held: dict[int, tuple[float, int, int]]) -> RankMismatchError:
    """Return the error that names the ranks whose state differs from the majority.

    `held`: each rank's scale, updates so far and clean steps.
    """
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
