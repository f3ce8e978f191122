"""Skip a step without asking: compute it, then put back what must not count.

Parameters, state and step counters are copied before the step and selected after it.
That costs memory for one copy and no wait.  Optimizers that take `found_inf` do the
same inside their kernels and need none of this.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from buoy.torch.errors import DeviceModeError

__all__ = ["put_back", "refuse_unknown", "selected_step"]

# What each kind of optimizer's state holds before its first step, where that is not 0.
_ONES = {"mu_product", "mu"}
_LEARNING_RATES = {"step_size", "eta"}
_KNOWN = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    *([torch.optim.Muon] if hasattr(torch.optim, "Muon") else []),  # torch >= 2.9
)


def selected_step(
    optimizer: Any,
    found: torch.Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    step: Any = None,
) -> Any:
    """Step; keep the result where `found` is 0, what was there where it is 1.

    A step that is going to be put back runs on zeros for gradients, so that hooks of
    the optimizer never see a weight that is not finite; one that raises is put back.
    """
    refuse_unknown(optimizer, known_state=bool(optimizer.state))
    skip = found > 0
    with torch.no_grad():
        params = [(param, param.detach().clone()) for param in _stepped(optimizer)]
        before = {
            (id(param), name): value.clone()
            for param, name, value in _state_tensors(optimizer)
        }
    if step is not None:  # traced: without hooks, and nothing raises
        result = step(*args, **kwargs)
        _select(optimizer, params, before, skip)
        return result
    with _zeroed(params, skip):
        try:
            result = optimizer.step(*args, **kwargs)
        except BaseException:
            _select(optimizer, params, before, torch.ones_like(skip))
            raise
    _select(optimizer, params, before, skip)
    return result


@torch.no_grad()
def _select(
    optimizer: Any,
    params: list[tuple[torch.Tensor, torch.Tensor]],
    before: dict[tuple[int, str], torch.Tensor],
    skip: torch.Tensor,
) -> None:
    for param, old in params:
        param.copy_(torch.where(skip.to(param.device), old, param))
    for param, name, value in _state_tensors(optimizer):
        put_back(optimizer, param, name, value, before.get((id(param), name)), skip)


@contextmanager
def _zeroed(
    params: list[tuple[torch.Tensor, torch.Tensor]], skip: torch.Tensor
) -> Iterator[None]:
    """Show the optimizer zeros in place of gradients that must not count."""
    held = [(param, param.grad) for param, _ in params]
    for param, grad in held:
        if grad is not None and not grad.is_sparse:
            param.grad = grad.masked_fill(skip.to(grad.device), 0.0)
    try:
        yield
    finally:
        for param, grad in held:
            param.grad = grad


def _stepped(optimizer: Any) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                yield param


def _state_tensors(optimizer: Any) -> Iterator[tuple[Any, str, torch.Tensor]]:
    for param, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                yield param, name, value


def put_back(
    optimizer: Any,
    param: Any,
    name: str,
    value: torch.Tensor,
    old: torch.Tensor | None,
    skip: torch.Tensor,
) -> None:
    """Select one tensor of a state: as it is, or as it was where `skip` is true."""
    if value.device != skip.device and value.device.type == "cpu":
        message = (
            f"{type(optimizer).__name__} keeps `{name}` on the CPU, so a skipped step "
            "cannot be undone there without waiting for the device. Build it with "
            "`capturable=True`, or `fused=True`, or leave `sync='auto'`."
        )
        raise DeviceModeError(message)
    if old is None:
        old = torch.full_like(value, _initial(optimizer, param, name))
    value.copy_(torch.where(skip.to(value.device), old, value))


def _initial(optimizer: Any, param: Any, name: str) -> complex:
    if name in _ONES:
        return 1.0
    if name in _LEARNING_RATES:
        for group in optimizer.param_groups:
            if any(param is held for held in group["params"]):
                rate = float(group["lr"])
                return complex(rate, rate) if param.is_complex() else rate
    return 0.0


def refuse_unknown(optimizer: Any, *, known_state: bool) -> None:
    """Refuse an optimizer whose steps could not be undone on the device."""
    kind = type(optimizer).__name__
    if type(optimizer) not in _KNOWN:
        if not known_state:
            message = (
                f"`sync='never'` does not know what {kind} keeps before its first "
                "step, so a skipped first step could not be undone. Use one of "
                f"{', '.join(known.__name__ for known in _KNOWN)}, an optimizer that "
                "takes `found_inf`, or `sync='auto'`."
            )
            raise DeviceModeError(message)
        _refuse_numbers(optimizer)
    for group in optimizer.param_groups:
        if group.get("momentum") and group.get("dampening"):
            message = (
                "`sync='never'` cannot undo a skipped first step of SGD with "
                "`dampening`, whose momentum starts otherwise than it goes on. Use "
                "`dampening=0` or `sync='auto'`."
            )
            raise DeviceModeError(message)


def _refuse_numbers(optimizer: Any) -> None:
    """Refuse state that lies on the host: whether to put it back is not known there."""
    for state in optimizer.state.values():
        for name, value in state.items() if isinstance(state, dict) else ():
            if not isinstance(value, torch.Tensor):
                message = (
                    f"{type(optimizer).__name__} keeps `{name}` as "
                    f"{type(value).__name__}, on the host, where a skipped step cannot "
                    "be put back without asking the device. Keep it as a tensor, or "
                    "use `sync='auto'`."
                )
                raise DeviceModeError(message)
