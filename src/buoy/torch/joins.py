"""Ranks that run out of data before others: `Join([model, scaler])`.

While the others go on, such a rank says that it found nothing and hears what they
decide, so that its scale is theirs at the end.  What they ask to clip they announce
when they agree; all else it repeats from its own last iteration.
"""

import weakref
from typing import Any

import torch
from torch import distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook

from buoy.torch import apply, replicas
from buoy.torch.errors import OptionError
from buoy.torch.gather import Gathered
from buoy.torch.retry import Retrying

__all__ = ["Joining", "Shadow"]


class Joining(Retrying):
    """What `torch.distributed.algorithms.Join` asks of those who are named to it."""

    _shadow: "Shadow | None" = None

    def join_hook(self, **_: Any) -> "Shadow":
        """Give what a rank without data does while others have some.

        Example:
            >>> import buoy.torch
            >>> hook = buoy.torch.GradScaler("cpu").join_hook()
            >>> hook.main_hook()  # alone there is nobody to follow
        """
        if self._enabled and (self._groups or self._spikes is not None):
            raise OptionError(_NOT_FOLLOWED)
        before = self._shadow
        if before is not None:
            before.post_hook()
        self._shadow = Shadow(self, before)
        if self._enabled and self._ranks.groups():
            # Everybody is here now, even who has no data at all.
            self._ranks.lines(torch.device(self._device))
            self._shadow.listen()
        return self._shadow

    @property
    def join_device(self) -> torch.device:
        """Name the device whose tensors `Join` may send."""
        return torch.device(self._device)

    @property
    def join_process_group(self) -> Any:
        """Name the group in which ranks are counted."""
        groups = self._ranks.groups()
        if len(groups) > 1:
            raise OptionError(_SEVERAL)
        everybody = not groups or groups[0].size() == dist.get_world_size()
        return dist.group.WORLD if everybody else groups[0]

    @property
    def _join_config(self) -> Any:
        return self.__dict__.get("_joined_as")

    @_join_config.setter
    def _join_config(self, config: Any) -> None:
        if config.is_first_joinable:
            raise OptionError(_FIRST)
        self.__dict__["_joined_as"] = config
        # Where the first rank to end ends all, nobody is ever followed.
        self._uneven = config.enable and not config.throw_on_early_termination
        if self._shadow is not None and not self._uneven:
            self._shadow.post_hook()


_SEVERAL = (
    "Join counts ranks in one group, and this scaler agrees in several. Give it one "
    "that holds all of them: `process_group=dist.new_group(ranks)`."
)
_NOT_FOLLOWED = (
    "In Join a rank without data follows the scale, its policy and clipping, but not "
    "scale groups or a spike guard: their states would part from the other ranks'. "
    "Leave them out, or give every rank the same number of batches."
)
_FIRST = (
    "Name the model before the scaler: `Join([model, scaler])`. The first one tells "
    "the ranks that have joined of each iteration, and a scaler hears of it too late, "
    "after the forward pass."
)


def _nobody(_: Any) -> None:
    """Count nothing: who did is gone."""


class Shadow:
    """Follows the others' decisions on a rank that has no data left."""

    def __init__(self, scaler: Any, before: "Shadow | None" = None) -> None:
        self._scaler = scaler
        self._batches = 1  # forward passes per update
        self._questions = ["agree"]
        if before is not None:  # an earlier epoch's, should this one have no data here
            self._batches, self._questions = before._batches, before._questions
        self._passed = 0  # forward passes since the last update
        self._repeats = False
        self._counting: Any = None

    # -- while this rank has data ----------------------------------------------------

    def listen(self) -> None:
        """Begin to take notes."""
        self._scaler._ranks.heard = []
        self._scaler._listeners.append(self)
        counts = weakref.WeakMethod(self._announced)
        self._counting = register_module_forward_pre_hook(
            lambda module, _: (counts() or _nobody)(module)
        )
        # An exception leaves Join without a word.
        weakref.finalize(self, self._counting.remove)

    def _announced(self, module: Any) -> None:
        """Count the forward passes that joined ranks hear of."""
        config = module.__dict__.get("_join_config")
        if config is not None and config.enable and config.is_first_joinable:
            self._passed += 1

    def look(
        self, scaler: Any, optimizer: Any, record: dict[str, Any], gathered: Gathered
    ) -> None:
        """Need not see gradients."""

    def concluded(self, scaler: Any, *_: Any) -> None:
        """Remember how this iteration went."""
        if not self._repeats:
            self._batches = max(1, self._passed or scaler._scalings)
            self._questions = scaler._ranks.heard or self._questions
            scaler._ranks.heard, self._passed = [], 0

    # -- when it has none ------------------------------------------------------------

    def main_hook(self) -> None:
        """Take part in an iteration of the others, if this is when they step."""
        scaler = self._scaler
        if not (scaler._enabled and scaler._ranks.groups()):
            return
        self._passed += 1
        if self._passed < self._batches:
            return
        self._passed, self._repeats = 0, True
        self._repeat()
        scaler.update()

    def _repeat(self) -> None:
        """Ask what the others ask, with nothing to tell."""
        scaler = self._scaler
        scaler._check_scale_growth_tracker("step")
        nothing = torch.zeros((), dtype=torch.float64, device=scaler._home())
        for place, question in enumerate(self._questions):
            if question == "agree":
                self._agree(scaler._per_optimizer_states[-1 - place])  # nobody's id
            elif question == "norm":
                replicas.ask_norm(scaler, nothing, present=False).wait()
            else:
                scaler._ranks.largest(question, nothing.float())

    def _agree(self, record: dict[str, Any]) -> None:
        scaler = self._scaler
        record["plan"] = torch.zeros((), dtype=torch.float32, device=scaler._home())
        scaler._agree(record, {})
        scaler._settle(record)
        for found in record["found_inf_per_device"].values():
            apply.see(record, found)
        replicas.follow(scaler, record)

    def post_hook(self, *_: bool) -> None:
        """Stop taking notes: all have arrived, with the same scale."""
        scaler = self._scaler
        scaler._ranks.heard, scaler._uneven = None, False
        if self._counting is not None:
            self._counting.remove()
        if scaler._enabled and self in scaler._listeners:
            scaler._listeners.remove(self)
