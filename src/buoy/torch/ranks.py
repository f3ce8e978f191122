"""The other ranks: who they are, how to ask them all at once, and who is missing.

Alone there is nobody to ask, and finding that out is all that this costs.

Over gloo all ranks are asked through a group of the scaler's own, because there a
collective that meets another one ends the process: a rank that has run out of data and
shadows its model's collectives (`Join`) would be that other one.  Elsewhere a group
costs memory of the device, and the default group is used.
"""

import math
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import distributed as dist

from buoy._backends import torch as backend
from buoy.torch import questions, words_ranks
from buoy.torch.errors import OptionError

__all__ = ["Answer", "ProcessGroups", "Ranks"]

# One group, several, a DeviceMesh, or None for every rank there is.
ProcessGroups = Any

_GRACE = 3.0  # seconds in which those who are still there answer a roll call
_POLL = 0.02


class Answer:
    """Numbers of each rank on their way to become those of all."""

    def __init__(
        self, ranks: "Ranks", question: str, numbers: torch.Tensor, op: Any
    ) -> None:
        self._ranks, self._question, self._op = ranks, question, op
        self._home, self._shape = numbers.device, numbers.shape
        with ranks.missed():
            first, *self._rest = ranks.lines(self._home)
        wire = numbers.to(ranks.wire(self._home))
        self._message = questions.packed(question, wire)
        with ranks.missed():
            self._work = dist.all_reduce(self._message, op, first, async_op=True)

    def wait(self) -> torch.Tensor:
        """Give what all ranks made of it; with NCCL only the device waits."""
        with self._ranks.missed():
            if self._work is not None:
                self._work.wait()
            for group in self._rest:
                dist.all_reduce(self._message, self._op, group)
        self._refuse_others()
        found = questions.content(self._message, self._shape)
        return found.to(self._home, non_blocking=True)

    def _refuse_others(self) -> None:
        """Raise if other ranks asked something else, where the host can see it."""
        head = self._message[:2].float()
        if not backend.in_host_memory(head):
            return
        code = questions.code_of(self._question)
        count = self._ranks.count() if self._op == dist.ReduceOp.SUM else 1
        if backend.values(head) == [count * code, -count * code]:
            return
        own = torch.full((), code, dtype=torch.float64, device=head.device)
        codes = self._ranks.gather(own).tolist()
        raise words_ranks.different_questions(self._ranks.members(), codes)


class Ranks:
    """The ranks that hold one scale together.

    By default all of torch.distributed's, once it is initialised: whoever trains one
    model steps together, however its parameters are laid out.
    """

    def __init__(self, given: ProcessGroups = None) -> None:
        # Not held: a group that outlives its process's end takes the process down.
        self._given = None if given is None else [*map(weakref.ref, _resolved(given))]
        self._asked = 0
        self.heard: list[str] | None = None  # what was asked, if somebody takes notes

    def groups(self) -> tuple[Any, ...]:
        """Give the groups to go through, one after the other; none when alone."""
        if self._given is None:
            world = dist.group.WORLD if _AVAILABLE else None
            return () if world is None or world.size() == 1 else (world,)
        groups = tuple(group() for group in self._given)
        if None in groups:
            raise OptionError(_ENDED)
        return groups

    def lines(self, home: torch.device) -> tuple[Any, ...]:
        """Give the groups to ask through; the first call is one of all ranks."""
        groups = self.groups()
        if self._given is None and groups:
            return (_own_line(groups[0], self.wire(home)),)
        return groups

    def count(self) -> int:
        """Count the ranks; of a grid those of all its rows."""
        return math.prod(group.size() for group in self.groups())

    def ask(self, question: str, numbers: torch.Tensor, op: Any) -> Answer:
        """Send numbers off to be reduced over all ranks."""
        self._asked += 1
        return Answer(self, question, numbers, op)

    def note(self, question: str) -> None:
        """Say what is asked next, for a rank that will have to repeat it."""
        if self.heard is not None:
            self.heard.append(question)

    def largest(self, question: str, numbers: torch.Tensor) -> torch.Tensor:
        """Take the element-wise maximum over all ranks, now."""
        return self.ask(question, numbers, dist.ReduceOp.MAX).wait()

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Collect a tensor of the same shape from every rank, on the host."""
        self._asked += 1
        whole = tensor.to(self.wire(tensor.device)).unsqueeze(0)
        with self.missed():
            for group in self.lines(tensor.device):
                parts = [torch.empty_like(whole) for _ in range(group.size())]
                dist.all_gather(parts, whole.contiguous(), group)
                whole = torch.cat(parts)
        return whole.cpu()

    def members(self) -> list[int]:
        """Name the ranks, in the order of `gather`."""
        found = [dist.get_rank()]
        for group in self.lines(torch.device("cpu")):
            others: list[Any] = [None] * group.size()
            dist.all_gather_object(others, found, group)
            found = [rank for some in others for rank in some]
        return found

    def wire(self, home: torch.device) -> torch.device:
        """Choose the device on which a group can reduce what lies on another."""
        kinds = [device.type for device in self.groups()[0]._device_types]
        if home.type in kinds:
            return home
        return torch.device("cpu" if "cpu" in kinds else kinds[0])

    @contextmanager
    def missed(self) -> Iterator[None]:
        """Turn the failure of a collective into an error that names who is absent."""
        try:
            yield
        except RuntimeError as error:
            raise words_ranks.absent(self.roll_call(), error) from error

    def roll_call(self) -> tuple[list[int], list[int]] | None:
        """Ask, through the store, who is there: after a failure, never before.

        Gives those present and those absent; None if the store is gone as well.
        """
        ranks = sorted({rank for group in self.groups() for rank in _members(group)})
        keys = {rank: f"buoy/{self._asked}/{rank}" for rank in ranks}
        until = time.monotonic() + _GRACE
        try:
            store = dist.distributed_c10d._get_default_store()
            store.set(keys[dist.get_rank()], "here")
            while time.monotonic() < until and not store.check(list(keys.values())):
                time.sleep(_POLL)
            here = [rank for rank, key in keys.items() if store.check([key])]
        except (RuntimeError, ValueError):
            return None
        return here, [rank for rank in ranks if rank not in here]

    def __reduce__(self) -> Any:
        # A group belongs to its process: what is loaded elsewhere starts with all,
        # and who agrees with nobody goes on alone.
        return (Ranks, ((),) if self._given == [] else ())

    def __deepcopy__(self, memo: dict[int, Any]) -> "Ranks":
        return self


_AVAILABLE = dist.is_available()
_OWN: "WeakKeyDictionary[Any, weakref.ref[Any]]" = WeakKeyDictionary()


def _own_line(world: Any, wire: torch.device) -> Any:
    """Give the group that the scalers of this process ask all ranks through."""
    # Asked of the device's part: a group may have one backend for each kind.
    if world._get_backend(wire).name() != "gloo":
        return world
    held = _OWN.get(world)
    made = None if held is None else held()
    if made is None:
        timeout = world._get_backend(wire).options._timeout
        made = dist.new_group(backend="gloo", timeout=timeout, group_desc="buoy")
        _OWN[world] = weakref.ref(made)
    return made


def _members(group: Any) -> list[int]:
    found: list[int] = dist.get_process_group_ranks(group)
    return found


def _resolved(given: ProcessGroups) -> tuple[Any, ...]:
    if hasattr(given, "get_all_groups"):  # a DeviceMesh
        if dist.is_initialized() and given.size() == dist.get_world_size():
            return _useful([dist.group.WORLD])
        return _useful(given.get_all_groups())
    some = list(given) if isinstance(given, Sequence) else [given]
    for group in some:
        if not hasattr(group, "size"):
            raise OptionError(_NO_GROUP.format(group))
    return _useful(some)


_NO_GROUP = (
    "`process_group` must be a process group of torch.distributed that this rank is a "
    "member of, several of them, a DeviceMesh, or () for a rank that agrees with "
    "nobody, got {!r}."
)


_ENDED = (
    "A `process_group` of this scaler has been destroyed, so its ranks cannot agree "
    "any more. Make the scaler anew after init_process_group; its state can be loaded."
)


def _useful(groups: list[Any]) -> tuple[Any, ...]:
    """Leave out groups of one; one that holds everybody is enough."""
    found = [group for group in groups if group.size() > 1]
    for group in found:
        if group.size() == dist.get_world_size():
            return (group,)
    return tuple(found)
