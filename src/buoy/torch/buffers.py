"""Copies of modules' buffers, and putting them back."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from buoy.torch.errors import DeviceModeError

__all__ = ["Buffers"]


@dataclass(slots=True)
class _Held:
    module: torch.nn.Module
    name: str
    tensor: torch.Tensor
    copy: torch.Tensor


class Buffers:
    """What modules' buffers held at one moment.

    All are copied: batch normalisation writes without leaving a trace in the tensor's
    version, so none can be said not to have changed.

    Example:
        >>> norm = torch.nn.BatchNorm1d(1)
        >>> kept = Buffers()
        >>> kept.hold(norm)
        >>> _ = norm(torch.ones(4, 1))
        >>> kept.put_back()
        >>> norm.num_batches_tracked.item()
        0
    """

    def __init__(self) -> None:
        self._held: dict[tuple[int, str], _Held] = {}
        self._now: set[int] = set()  # modules whose copies are of this moment

    def hold(self, *modules: torch.nn.Module) -> None:
        """Copy the buffers of these modules alone, not of those inside them.

        Once per moment: until `release` a module is not looked at again.
        """
        for module in modules:
            if id(module) in self._now:
                continue
            self._now.add(id(module))
            for name, tensor in module._buffers.items():
                if tensor is not None:
                    self._hold_one(module, name, tensor)

    @torch.no_grad()
    def _hold_one(
        self, module: torch.nn.Module, name: str, tensor: torch.Tensor
    ) -> None:
        held = self._held.get((id(module), name))
        if held is not None and _alike(held.copy, tensor):
            copy = held.copy.copy_(tensor)
        else:
            copy = tensor.detach().clone()
        self._held[id(module), name] = _Held(module, name, tensor, copy)

    def release(self) -> None:
        """End the moment: the next `hold` copies anew."""
        self._now.clear()

    @torch.no_grad()
    def put_back(self, skip: torch.Tensor | None = None) -> None:
        """Put back what this moment's copies hold; with `skip`, where it is true."""
        for held in self._current():
            if skip is not None:
                _select(held, skip)
                continue
            held.module._buffers[held.name] = held.tensor
            if held.tensor.shape != held.copy.shape:  # as observers begin: with none
                held.tensor.resize_(held.copy.shape)
            held.tensor.copy_(held.copy)

    def _current(self) -> Iterable[_Held]:
        return [held for held in self._held.values() if id(held.module) in self._now]


def _select(held: _Held, skip: torch.Tensor) -> None:
    now = held.module._buffers.get(held.name)
    if now is None or not _alike(now, held.copy):
        message = (
            f"The buffer `{held.name}` of a {type(held.module).__name__} changed its "
            "shape, dtype or device in a step, so it cannot be put back without "
            "asking the device whether the step was skipped. Leave `sync='auto'` and "
            "do not use a fused optimizer, or do not guard that module."
        )
        raise DeviceModeError(message)
    now.copy_(torch.where(skip.to(now.device, non_blocking=True), held.copy, now))


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (
        other.shape,
        other.dtype,
        other.device,
    )
