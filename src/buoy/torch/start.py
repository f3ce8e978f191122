"""Where a step began, so that it can be given up half-way."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from buoy.torch.gather import parameters_of
from buoy.torch.masters import masters_of

__all__ = ["StartingPoint"]


class StartingPoint:
    """Copies of weights, masters, state and settings of an optimizer.

    An optimizer that wraps another, as SAM does, is copied together with it.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.9)
        >>> start = StartingPoint(optimizer)
        >>> weight.grad = torch.ones(1)
        >>> optimizer.step()
        >>> start.restore()
        >>> weight.item(), len(optimizer.state)
        (1.0, 0)
    """

    @torch.no_grad()
    def __init__(self, optimizer: Any) -> None:
        held = parameters_of(optimizer)
        masters = masters_of(optimizer)
        if masters is not None:
            held = [*held, *masters.masters]
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in held]
        self._parts = [
            (one, _copied(_state(one)), [_settings(g) for g in one.param_groups])
            for one in _family(optimizer)
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back; what the step added is gone."""
        for tensor, old in self._tensors:
            tensor.copy_(old)
        for one, state, groups in self._parts:
            _state(one).clear()
            _state(one).update(state)
            for group, settings in zip(one.param_groups, groups, strict=True):
                group.update(settings)

    now = restore

    def where(self, skip: torch.Tensor) -> None:
        """Put everything back if `skip` is true; this asks, as all closures do."""
        if skip.item():
            self.restore()


def _family(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer and those that it holds."""
    yield optimizer
    for value in list(getattr(optimizer, "__dict__", {}).values()):
        if isinstance(value, torch.optim.Optimizer) and value is not optimizer:
            yield from _family(value)


def _state(optimizer: Any) -> Any:
    return getattr(optimizer, "state", {})


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: _copied(value) for name, value in group.items() if name != "params"}


def _copied(value: Any) -> Any:
    """Copy tensors wherever they lie in containers; keep what else there is."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(part) for key, part in value.items()}
    if isinstance(value, deque):
        return deque(map(_copied, value), value.maxlen)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_copied, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(_copied, value))
    return value
