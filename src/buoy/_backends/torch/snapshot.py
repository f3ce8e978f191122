"""Snapshots of optimizers, buffers and random generators, and how to restore them.

Call `restore` if the host knows that the step was skipped.  `restore_where` takes a
flag on a device, and restores if it is true, without waiting for it.
"""

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from buoy._backends.torch.gradients import parameters_of
from buoy._core.errors import DeviceModeError

__all__ = ["BufferSnapshot", "OptimizerSnapshot", "RandomSnapshot", "zeroed_gradients"]

# Optimizers of torch whose state before the first step is known; Muon: torch >= 2.9.
_NAMES = "SGD Adam AdamW Adagrad Adadelta Adamax ASGD NAdam RAdam RMSprop Rprop Muon"
_KNOWN = {getattr(torch.optim, name, None) for name in _NAMES.split()}
# Names in their state that do not start at 0.
_START_AT_ONE = {"mu_product", "mu"}
_START_AT_LEARNING_RATE = {"step_size", "eta"}
_ACCELERATORS = ("cuda", "xpu", "npu", "mtia")


class _Copy(NamedTuple):
    value: Any  # the object itself
    old: Any  # for a tensor its values, for a container copies of its parts, else None


class OptimizerSnapshot:
    """Copies of an optimizer's weights, masters, state and settings.

    An optimizer that wraps another, as SAM does, is copied together with it.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.9)
        >>> snapshot = OptimizerSnapshot(optimizer)
        >>> weight.grad = torch.ones(1)
        >>> optimizer.step()
        >>> snapshot.restore()
        >>> weight.item(), len(optimizer.state)
        (1.0, 0)
    """

    def __init__(self, optimizer: Any) -> None:
        members = _with_wrapped(optimizer)
        weights = parameters_of(optimizer)
        for one in members:
            masters = getattr(one, "_buoy_masters", None)
            weights += [] if masters is None else masters.masters
        self._weights = [_copy(one) for one in dict.fromkeys(weights)]
        self._states = [(one, _copy(getattr(one, "state", {}))) for one in members]
        self._settings = [
            (group, {name: _copy(group[name]) for name in group if name != "params"})
            for one in members
            for group in one.param_groups
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything; remove entries added to the state since.

        A parameter group that was added since is not changed.
        """
        for copy in (*self._weights, *(state for _, state in self._states)):
            _restore(copy)
        for group, settings in self._settings:
            for name in group.keys() - settings.keys() - {"params"}:
                del group[name]
            group.update({name: _restore(copy) for name, copy in settings.items()})

    def restore_where(self, skip: torch.Tensor) -> None:
        """Restore weights and state if `skip` is true, without waiting for it.

        If that is not possible, restore everything and raise a DeviceModeError.
        """
        try:
            self.check_device()
            for weight, old in self._weights:
                _select(weight, old, skip)
            for optimizer, state in self._states:
                _select_state(optimizer, state, skip)
        except DeviceModeError:
            self.restore()
            raise

    def check_device(self) -> None:
        """Raise for an optimizer whose steps `restore_where` cannot undo."""
        for optimizer, state in self._states:
            _check_device(optimizer, started=bool(state.old))


def _with_wrapped(optimizer: Any) -> list[Any]:
    """Return an optimizer and those that it wraps."""
    found = [optimizer]
    for one in found:
        for value in getattr(one, "__dict__", {}).values():
            if isinstance(value, torch.optim.Optimizer):
                found += [value] if all(value is not two for two in found) else []
    return found


def _copy(value: Any) -> _Copy:
    """Copy the tensors in nested containers; keep everything else."""
    if isinstance(value, torch.Tensor):
        return _Copy(value, value.detach().clone())
    if isinstance(value, dict):
        return _Copy(value, {key: _copy(part) for key, part in value.items()})
    if isinstance(value, (list, tuple, deque)):
        return _Copy(value, [_copy(part) for part in value])
    return _Copy(value, None)


def _restore(copy: _Copy) -> Any:
    """Restore a value in place, and return it."""
    value, old = copy
    if isinstance(value, torch.Tensor):
        if value.shape != old.shape:  # quantisation observers start empty
            value.resize_(old.shape)
        value.copy_(old)
    elif isinstance(value, dict):
        parts = {key: _restore(part) for key, part in old.items()}
        value.clear()
        value.update(parts)
    elif isinstance(value, (list, tuple, deque)):
        restored = [_restore(part) for part in old]
        if not isinstance(value, tuple):
            value.clear()
            value.extend(restored)
    return value


@torch.no_grad()
def _select(value: torch.Tensor, old: torch.Tensor, skip: torch.Tensor) -> None:
    value.copy_(torch.where(skip.to(value.device, non_blocking=True), old, value))


def _select_state(optimizer: Any, copy: _Copy, skip: torch.Tensor) -> None:
    for param, state in copy.value.items():
        before = copy.old[param].old if param in copy.old else {}
        for name, value in state.items():
            if not isinstance(value, torch.Tensor):
                continue
            if value.device != skip.device and value.device.type == "cpu":
                message = (
                    f"{type(optimizer).__name__} keeps `{name}` on the CPU, so a "
                    "skipped step cannot be undone without waiting for the device. "
                    "Build it with `capturable=True` or `fused=True`, or leave "
                    "`sync='auto'`."
                )
                raise DeviceModeError(message)
            old = before[name].old if name in before else None
            if old is None:
                old = torch.full_like(value, _initial(optimizer, param, name))
            _select(value, old, skip)


def _initial(optimizer: Any, param: Any, name: str) -> complex:
    """Return the value of an entry of an optimizer's state before the first step."""
    if name not in _START_AT_LEARNING_RATE:
        return 1.0 if name in _START_AT_ONE else 0.0
    groups = optimizer.param_groups
    rates = (g["lr"] for g in groups if any(param is one for one in g["params"]))
    rate = float(next(rates))
    return complex(rate, rate) if param.is_complex() else rate


def _check_device(optimizer: Any, *, started: bool) -> None:
    if type(optimizer) not in _KNOWN:
        _check_unknown(optimizer, started=started)
    for group in optimizer.param_groups:
        if group.get("momentum") and group.get("dampening"):
            message = (
                "`sync='never'` cannot undo a skipped first step of SGD with "
                "`dampening`: the first momentum is not dampened. Use `dampening=0` or "
                "`sync='auto'`."
            )
            raise DeviceModeError(message)


def _check_unknown(optimizer: Any, *, started: bool) -> None:
    kind = type(optimizer).__name__
    if not started:
        message = (
            f"`sync='never'` does not know what {kind} keeps before its first step, so "
            "a skipped first step could not be undone. Use an optimizer that takes "
            f"`found_inf`, `sync='auto'`, or one of {_NAMES.replace(' ', ', ')}."
        )
        raise DeviceModeError(message)
    for state in optimizer.state.values():
        for name, value in state.items() if isinstance(state, dict) else ():
            if not isinstance(value, torch.Tensor):
                message = (
                    f"{kind} keeps `{name}` as {type(value).__name__}, on the host, "
                    "where a skipped step cannot be undone without waiting for the "
                    "device. Keep it as a tensor, or use `sync='auto'`."
                )
                raise DeviceModeError(message)


class BufferSnapshot:
    """Copies of modules' buffers.

    All are copied: batch normalisation does not change `_version`, so changes cannot be
    detected.

    Example:
        >>> norm = torch.nn.BatchNorm1d(1)
        >>> snapshot = BufferSnapshot()
        >>> snapshot.copy(norm)
        >>> _ = norm(torch.ones(4, 1))
        >>> snapshot.restore()
        >>> norm.num_batches_tracked.item()
        0
    """

    def __init__(self) -> None:
        self._copies: dict[tuple[torch.nn.Module, str], _Copy] = {}

    def copy(self, *modules: torch.nn.Module) -> None:
        """Copy the buffers of these modules, without their submodules.

        A buffer that was already copied keeps its first copy, until `clear`.
        """
        for module in modules:
            for name, tensor in module._buffers.items():
                if tensor is not None and (module, name) not in self._copies:
                    self._copies[module, name] = _copy(tensor)

    def __len__(self) -> int:
        """Return the number of buffers that were copied."""
        return len(self._copies)

    def clear(self) -> None:
        """Drop all copies."""
        self._copies.clear()

    @torch.no_grad()
    def restore(self) -> None:
        """Restore every buffer that was copied."""
        for (module, name), copy in self._copies.items():
            module._buffers[name] = _restore(copy)

    def restore_where(self, skip: torch.Tensor) -> None:
        """Restore if `skip` is true, without waiting for it."""
        for (module, name), (_, old) in self._copies.items():
            now = module._buffers.get(name)
            if now is None or _layout(now) != _layout(old):
                message = (
                    f"The buffer `{name}` of a {type(module).__name__} changed its "
                    "shape, dtype or device in a step, so a skipped step cannot be "
                    "undone without waiting for the device. Leave `sync='auto'` and "
                    "use no fused optimizer, or do not guard that module."
                )
                raise DeviceModeError(message)
            _select(now, old, skip)


def _layout(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


class RandomSnapshot:
    """The state of torch's, Python's and NumPy's random number generators.

    Example:
        >>> snapshot = RandomSnapshot()
        >>> first = torch.rand(3)
        >>> snapshot.restore()
        >>> torch.equal(first, torch.rand(3))
        True
    """

    def __init__(self) -> None:
        self._saved: list[tuple[Callable[[Any], Any], Any]] = [
            (torch.set_rng_state, torch.get_rng_state()),
            (random.setstate, random.getstate()),
        ]
        for module in _accelerators():
            every = "_all" if hasattr(module, "get_rng_state_all") else ""
            state = getattr(module, f"get_rng_state{every}")()
            self._saved.append((getattr(module, f"set_rng_state{every}"), state))
        if numpy := sys.modules.get("numpy"):
            self._saved.append((numpy.random.set_state, numpy.random.get_state()))

    def restore(self) -> None:
        """Restore the state of every generator."""
        for restore, state in self._saved:
            restore(state)


def _accelerators() -> list[Any]:
    """Return the torch modules of the accelerators that are initialised."""
    found = [getattr(torch, name, None) for name in _ACCELERATORS]
    started: list[Any] = [one for one in found if one and one.is_initialized()]
    if torch.backends.mps.is_available():
        started.append(torch.mps)
    return started


@contextmanager
def zeroed_gradients(optimizer: Any, skip: torch.Tensor) -> Iterator[None]:
    """Replace the gradients by zeros if `skip` is true; sparse ones stay."""
    held = [(param, param.grad) for param in parameters_of(optimizer)]
    for param, grad in held:
        if grad is not None and not grad.is_sparse:
            param.grad = grad.masked_fill(skip.to(grad.device), 0.0)
    try:
        yield
    finally:
        for param, grad in held:
            param.grad = grad
