"""Take an optimizer's step back: weights, state and step counters as they were."""

from typing import Any

import torch

from buoy.torch.masters import masters_of
from buoy.torch.select import put_back, refuse_unknown

__all__ = ["Undo"]


class Undo:
    """A copy of what a step is about to change.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> weight.grad = torch.ones(1)
        >>> optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.9)
        >>> undo = Undo(optimizer)
        >>> optimizer.step()
        >>> undo.now()
        >>> weight.item(), len(optimizer.state)
        (1.0, 0)
    """

    @torch.no_grad()
    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._params = [
            (param, param.detach().clone())
            for group in optimizer.param_groups
            for param in group["params"]
            if param.grad is not None
        ]
        masters = masters_of(optimizer)
        if masters is not None:
            self._params += [(one, one.detach().clone()) for one in masters.masters]
        self._settings = [
            {name: value for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        self._state = {
            param: {name: (value, _copied(value)) for name, value in held.items()}
            for param, held in getattr(optimizer, "state", {}).items()
        }

    @torch.no_grad()
    def now(self) -> None:
        """Put everything back; state that the step made is gone again."""
        for param, old in self._params:
            param.copy_(old)
        groups = self._optimizer.param_groups
        for group, settings in zip(groups, self._settings, strict=False):
            group.update(settings)  # a group that was added since stays as it is
        state = getattr(self._optimizer, "state", {})
        for param in [param for param in state if param not in self._state]:
            del state[param]
        for param, held in self._state.items():
            state[param] = {name: _restored(*pair) for name, pair in held.items()}

    @torch.no_grad()
    def where(self, skip: torch.Tensor) -> None:
        """Put everything back where `skip` is true, without asking whether it is."""
        refuse_unknown(self._optimizer, known_state=bool(self._state))
        for param, old in self._params:
            param.copy_(torch.where(skip.to(param.device), old, param))
        for param, held in self._optimizer.state.items():
            before = self._state.get(param, {})
            for name, value in held.items():
                if isinstance(value, torch.Tensor):
                    old = before.get(name, (None, None))[1]
                    put_back(self._optimizer, param, name, value, old, skip)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _restored(value: Any, old: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return old
    value.copy_(old)
    return value
