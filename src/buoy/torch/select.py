"""Skip a step without asking: compute it, then put back what must not count.

Parameters, state and step counters are copied before the step and selected after it.
That costs memory for one copy and no wait.  Optimizers that take `found_inf` do the
same inside their kernels and need none of this.
"""

from collections.abc import Iterator
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
)


def selected_step(
    optimizer: Any,
    found: torch.Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    step: Any = None,
) -> Any:
    """Step; keep the result where `found` is 0, what was there where it is 1."""
    refuse_unknown(optimizer, known_state=bool(optimizer.state))
    skip = found > 0
    with torch.no_grad():
        params = [(param, param.detach().clone()) for param in _stepped(optimizer)]
        before = {
            id(value): (value, value.clone())
            for _, _, value in _state_tensors(optimizer)
        }
    result = (step or optimizer.step)(*args, **kwargs)
    with torch.no_grad():
        for param, old in params:
            param.copy_(torch.where(skip.to(param.device), old, param))
        for param, name, value in _state_tensors(optimizer):
            kept = before[id(value)][1] if id(value) in before else None
            put_back(optimizer, param, name, value, kept, skip)
    return result


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


def _initial(optimizer: Any, param: Any, name: str) -> float:
    if name in _ONES:
        return 1.0
    if name in _LEARNING_RATES:
        for group in optimizer.param_groups:
            if any(param is held for held in group["params"]):
                return float(group["lr"])
    return 0.0


def refuse_unknown(optimizer: Any, *, known_state: bool) -> None:
    """Refuse an optimizer whose first step could not be undone on the device."""
    if not isinstance(optimizer, _KNOWN) and not known_state:
        message = (
            f"`sync='never'` does not know what {type(optimizer).__name__} keeps "
            "before its first step, so a skipped first step could not be undone. Use "
            "an optimizer of torch.optim, one that takes `found_inf`, or `sync='auto'`."
        )
        raise DeviceModeError(message)
    for group in optimizer.param_groups:
        if group.get("momentum") and group.get("dampening"):
            message = (
                "`sync='never'` cannot undo a skipped first step of SGD with "
                "`dampening`, whose momentum starts otherwise than it goes on. Use "
                "`dampening=0` or `sync='auto'`."
            )
            raise DeviceModeError(message)
