"""Ranks that run out of data before others: `Join([model, scaler])`.

While the others go on, such a rank says that it found nothing and hears what they
decide, so that its scale is theirs at the end.  It repeats the questions of its own
last iteration: what others ask it cannot know.
"""

from typing import Any

import torch
from torch import distributed as dist

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
        if self._shadow is not None:
            self._shadow.post_hook()
        self._shadow = Shadow(self)
        if self._enabled and self._ranks.groups():
            self._ranks.lines()  # everybody is here now, even who has no data at all
            self._listeners.append(self._shadow)
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
        return groups[0] if groups else dist.group.WORLD

    @property
    def _join_config(self) -> Any:
        return self.__dict__.get("_joined_as")

    @_join_config.setter
    def _join_config(self, config: Any) -> None:
        if config.is_first_joinable:
            raise OptionError(_FIRST)
        self.__dict__["_joined_as"], self._uneven = config, config.enable
        if self._shadow is not None and not config.enable:
            self._shadow.post_hook()


_SEVERAL = (
    "Join counts ranks in one group, and this scaler agrees in several. Give it one "
    "that holds all of them: `process_group=dist.new_group(ranks)`."
)
_FIRST = (
    "Name the model before the scaler: `Join([model, scaler])`. The first one tells "
    "the ranks that have joined of each iteration, and a scaler hears of it too late, "
    "after the forward pass."
)


class Shadow:
    """Follows the others' decisions on a rank that has no data left."""

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler
        self._batches = 1  # forward passes per update
        self._passed = 0  # of them, since the last
        self._questions = ["agree"]
        self._repeats = False
        scaler._ranks.heard = []

    # -- while this rank has data ----------------------------------------------------

    def look(
        self, scaler: Any, optimizer: Any, record: dict[str, Any], gathered: Gathered
    ) -> None:
        """Need not see gradients."""

    def concluded(self, scaler: Any, *_: Any) -> None:
        """Remember how this iteration went."""
        if not self._repeats:
            self._batches = max(1, scaler._scalings)
            self._questions = scaler._ranks.heard or self._questions
            scaler._ranks.heard = []

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
        for record in self._repeated():
            scaler._settle(record)
            for found in record["found_inf_per_device"].values():
                apply.see(record, found)
        scaler.update()

    def _repeated(self) -> list[dict[str, Any]]:
        """Ask what the others ask, with nothing to tell; give what was launched."""
        scaler, records = self._scaler, []
        scaler._check_scale_growth_tracker("step")
        nothing = torch.zeros((), dtype=torch.float64, device=scaler._home())
        for place, question in enumerate(self._questions):
            if question == "agree":
                record = scaler._per_optimizer_states[-1 - place]  # no optimizer's id
                scaler._agree(record, {})
                records.append(record)
            elif question == "norm":
                replicas.ask_norm(scaler, nothing, present=False).wait()
            else:
                scaler._ranks.largest(nothing.float())
        return records

    def post_hook(self, *_: bool) -> None:
        """Stop taking notes: all have arrived, with the same scale."""
        scaler = self._scaler
        scaler._ranks.heard, scaler._uneven = None, False
        if scaler._enabled and self in scaler._listeners:
            scaler._listeners.remove(self)
