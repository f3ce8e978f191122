"""Process groups, and messages whose header detects mismatched calls.

In gloo, matching collectives of different sizes terminate the process, and of the same
size return meaningless numbers.  So all messages have one size, and their first two
numbers encode what a rank is doing: if ranks do different things, all get an error that
names them.  With gloo, all-rank messages use a separate process group, so that they
never match a collective of the model.  With other backends, where a process group
allocates device memory, they use the default process group.
"""

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import distributed as dist

from buoy._core.errors import AbsentRankError, OptionError, RankMismatchError

__all__ = [
    "Communicator",
    "Group",
    "NormGroup",
    "ProcessGroups",
    "checked_group",
    "code_of",
    "different_calls",
    "ranks_of",
]

Group = Any  # a process group of torch.distributed
ProcessGroups = Any  # one process group, several, a DeviceMesh, None for all ranks
NormGroup = Group | Callable[[torch.Tensor], Group | None] | None

# What a rank does when it sends a message.
_DOING = {
    "agree": "checking gradients (`unscale_` or `step`)",
    "clip": "clipping by a norm (`clip_grad_norm_` or a spike guard)",
    "loss": "scaling a loss that its policy looks at",
    "again": "running a step again (`scaler.run`)",
    "largest": "clipping by the largest gradient, after `unscale_`",
    "norm": "clipping by a norm, after `unscale_`",
    "parts": "adding up the norms of a model's parts",
}
_BYTES = 256  # of every message, its header included
_HEAD = 16  # bytes of the header
_GRACE = 3.0  # seconds to wait for the other ranks after a failure
_POLL = 0.02


def code_of(doing: str) -> float:
    """Return the code of an action: between 1 and 2, exact in every dtype."""
    return 1.0 + list(_DOING).index(doing) / 16.0


@cache
def _empty_message(
    doing: str, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    message = torch.zeros(_BYTES // dtype.itemsize, dtype=dtype, device=device)
    message[0] = code_of(doing)
    message[1] = -code_of(doing)
    return message


def _content(message: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    start = _HEAD // message.element_size()
    return message[start : start + shape.numel()].view(shape)


class Reduction:
    """An all-reduce of a few numbers that has started."""

    def __init__(
        self, communicator: "Communicator", doing: str, numbers: torch.Tensor, op: Any
    ) -> None:
        self._communicator = communicator
        self._op = op
        self._home = numbers.device
        self._shape = numbers.shape
        if _HEAD + numbers.nbytes > _BYTES:
            raise AssertionError(f"{numbers.nbytes} bytes do not fit into {_BYTES}")
        with communicator.naming_absent():
            first, *self._rest = communicator.send_groups(self._home)
        wire = numbers.to(communicator.comm_device(self._home))
        self._message = _empty_message(doing, wire.dtype, wire.device).clone()
        _content(self._message, self._shape).copy_(wire)
        with communicator.naming_absent():
            self._work = dist.all_reduce(self._message, op, first, async_op=True)

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the reduced numbers, and (for MAX) 0 if all ranks did the same.

        With NCCL only the device waits.
        """
        with self._communicator.naming_absent():
            if self._work is not None:
                self._work.wait()
            for group in self._rest:
                dist.all_reduce(self._message, self._op, group)
        numbers = _content(self._message, self._shape)
        both = numbers, self._message[:2].sum().float()
        found, gap = (part.to(self._home, non_blocking=True) for part in both)
        return found, gap


class Communicator:
    """Messages between the ranks of some process groups.

    All ranks of torch.distributed if no process group is given.
    """

    def __init__(self, given: ProcessGroups = None) -> None:
        # Weak references: a process group must not outlive torch.distributed.
        self._given = None if given is None else [*map(weakref.ref, _resolved(given))]
        self._sent = 0
        self._grid: list[int] | None = None  # the ranks of several process groups

    @property
    def is_empty(self) -> bool:
        """Whether it was made for a single rank."""
        return self._given == []

    def groups(self) -> tuple[Group, ...]:
        """Return the process groups to reduce over, in order; empty for one rank."""
        if self._given is None:
            world = dist.group.WORLD if _AVAILABLE else None
            return () if world is None or world.size() == 1 else (world,)
        groups = tuple(group() for group in self._given)
        if None in groups:
            raise OptionError(_DESTROYED)
        return groups

    def send_groups(self, home: torch.device) -> tuple[Group, ...]:
        """Return the process groups for messages; the first call is a collective."""
        groups = self.groups()
        if self._given is None and groups:
            return (_own_group(groups[0], self.comm_device(home)),)
        return groups

    def reduce(self, doing: str, numbers: torch.Tensor, op: Any) -> Reduction:
        """Start an all-reduce of numbers over all ranks."""
        self._sent += 1
        return Reduction(self, doing, numbers, op)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Collect a tensor of the same shape from every rank, on the host."""
        self._sent += 1
        whole = tensor.to(self.comm_device(tensor.device)).unsqueeze(0)
        with self.naming_absent():
            for group in self.send_groups(tensor.device):
                parts = [torch.empty_like(whole) for _ in range(group.size())]
                dist.all_gather(parts, whole.contiguous(), group)
                whole = torch.cat(parts)
        return whole.cpu()

    def members(self) -> list[int]:
        """Return the ranks, in the order of `gather`; may gather them, once."""
        groups = self.groups()
        if len(groups) == 1:
            return ranks_of(groups[0])
        if self._grid is None:
            own = torch.tensor(dist.get_rank(), dtype=torch.float64, device="cpu")
            self._grid = [int(rank) for rank in self.gather(own).tolist()]
        return self._grid

    def comm_device(self, home: torch.device) -> torch.device:
        """Return the device on which the process group can reduce these tensors."""
        kinds = [device.type for device in self.groups()[0]._device_types]
        if home.type in kinds:
            return home
        return torch.device("cpu" if "cpu" in kinds else kinds[0])

    @contextmanager
    def naming_absent(self) -> Iterator[None]:
        """Convert the failure of a collective into an error that names absent ranks."""
        try:
            yield
        except RuntimeError as error:
            raise _absent(self._roll_call(), error) from error

    def _roll_call(self) -> tuple[list[int], list[int]] | None:
        """Find out, through the store, which ranks respond; only after a failure.

        Returns those present and those absent; None if the store does not respond.
        """
        found = self.post(f"roll call {self._sent}", "here")
        ranks = sorted({rank for group in self.groups() for rank in ranks_of(group)})
        here = [rank for rank in ranks if rank in found]
        return (here, [rank for rank in ranks if rank not in found]) if here else None

    def post(self, topic: str, word: str, *, wait: bool = True) -> dict[int, str]:
        """Post a word in the store; return those of the ranks that posted theirs.

        Waits a few seconds at most.  Empty if the store does not respond.
        """
        keys: dict[str, int] = {}
        for group in self.groups():
            stamp = f"buoy/{topic}/{group.group_name}"
            _POSTED[stamp] += 1
            place = f"{stamp}/{_POSTED[stamp]}"
            keys |= {f"{place}/{rank}": rank for rank in ranks_of(group)}
        until = time.monotonic() + (_GRACE if wait else 0.0)
        try:
            store = dist.distributed_c10d._get_default_store()
            for key, rank in keys.items():
                if rank == dist.get_rank():
                    store.set(key, word)
            while time.monotonic() < until and not store.check(list(keys)):
                time.sleep(_POLL)
            return {
                r: store.get(k).decode() for k, r in keys.items() if store.check([k])
            }
        except (RuntimeError, ValueError):
            return {}


_AVAILABLE = dist.is_available()
_POSTED: Counter[str] = Counter()  # posts of this process, by topic and process groups
_OWN: "WeakKeyDictionary[Any, weakref.ref[Any]]" = WeakKeyDictionary()


def _own_group(world: Group, wire: torch.device) -> Group:
    """Return the process group for messages between the scalers of all ranks."""
    # A process group may have a different backend for each device type.
    if world._get_backend(wire).name() != "gloo":
        return world
    held = _OWN.get(world)
    made = None if held is None else held()
    if made is None:
        timeout = world._get_backend(wire).options._timeout
        made = dist.new_group(backend="gloo", timeout=timeout, group_desc="buoy")
        _OWN[world] = weakref.ref(made)
    return made


def ranks_of(group: Group) -> list[int]:
    """Return the global ranks of a process group."""
    found: list[int] = dist.get_process_group_ranks(group)
    return found


def checked_group(option: str, group: Any) -> Group:
    """Return a process group; raise if it is none, or lacks this rank."""
    if hasattr(group, "size") and hasattr(group, "rank"):
        return group
    message = (
        f"`{option}` must be a process group of torch.distributed that this rank is a "
        f"member of, {_OTHERWISE[option]}, got {group!r}."
    )
    raise OptionError(message)


_OTHERWISE = {
    "process_group": "several of them, a DeviceMesh, or () to train alone",
    "norm_group": "a callable from a parameter to such a group or None, or None",
}
_DESTROYED = (
    "A `process_group` or `norm_group` of this scaler has been destroyed, so its ranks "
    "cannot agree any more. Create a new scaler after init_process_group; its state "
    "can be loaded."
)


def _resolved(given: ProcessGroups) -> tuple[Group, ...]:
    if hasattr(given, "get_all_groups"):  # a DeviceMesh
        if dist.is_initialized() and given.size() == dist.get_world_size():
            return _useful([dist.group.WORLD])
        return _useful(given.get_all_groups())
    some = list(given) if isinstance(given, Sequence) else [given]
    return _useful([checked_group("process_group", group) for group in some])


def _useful(groups: list[Group]) -> tuple[Group, ...]:
    """Drop process groups of one rank; one of all ranks replaces the others."""
    found = [group for group in groups if group.size() > 1]
    for group in found:
        if group.size() == dist.get_world_size():
            return (group,)
    return tuple(found)


def _named(numbers: Sequence[int]) -> str:
    """Return ranks as text, at most eight."""
    shown = ", ".join(map(str, numbers[:8]))
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}{more}"


def different_calls(codes: dict[int, float]) -> RankMismatchError:
    """Return the error that lists what each rank does."""
    texts = {code_of(name): text for name, text in _DOING.items()}
    kinds = dict.fromkeys(codes[rank] for rank in sorted(codes))
    shown = "; ".join(
        f"{_named([rank for rank in sorted(codes) if codes[rank] == kind])}: "
        f"{texts[kind]}"
        for kind in kinds
    )
    return RankMismatchError(
        f"Ranks do different things in the same step: {shown}. Their numbers cannot be "
        "combined, so nothing was applied. Every rank must make the same calls in the "
        "same order: scalers with the same policy, `clip_grad_norm_` on all or on "
        "none, optimizers one after the other."
    )


def _absent(
    present: tuple[list[int], list[int]] | None, cause: BaseException
) -> AbsentRankError:
    """Return the error that names the ranks that did not take part."""
    here, missing = present or ([], [])
    if present is None:
        who = "A rank is missing, perhaps the one that hosts the store: it is gone"
    elif missing:
        who = f"Missing: {_named(missing)}; present: {_named(here)}"
    else:
        who = "All ranks are present, but the connection between them failed"
    reason = str(cause).strip().splitlines()[0] if str(cause).strip() else repr(cause)
    return AbsentRankError(
        f"Ranks could not agree on this step. {who}. Nothing was applied and the scale "
        "did not change. Either that rank has died (look at its log), or it takes "
        "fewer steps than the others: uneven inputs, a `step` under `if rank == 0`, an "
        "exception that only it caught. Every rank must call `scaler.step` equally "
        "often: pass equally many batches to every rank, or let a rank without data "
        "run a last batch with a loss of zero. If only some ranks train together, pass "
        "them as `process_group=`; a policy that looks at the loss needs "
        f"`scaler.loss_fn` in a pipeline. torch.distributed reported: {reason}",
        tuple(missing),
    )
