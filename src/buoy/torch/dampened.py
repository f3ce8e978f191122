"""The first momentum of a fused SGD with `dampening`, which torch's kernel cannot skip.

Such a momentum starts as the gradient itself and goes on with a share of it; torch's
kernel is told by the host which of both it is.  Where the host does not know whether an
earlier step was applied, these few steps are computed here and selected on the device.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from buoy.torch.mailbox import Mailbox

__all__ = ["fresh", "step"]

Fresh = list[tuple[torch.Tensor, dict[str, Any]]]  # a parameter, and its group


class _Doubt(NamedTuple):
    """A momentum of which the host does not know yet whether it has begun."""

    buffer: torch.Tensor
    never: torch.Tensor  # bool []: no step was applied so far
    mail: Mailbox

    def gone(self) -> bool:
        """Say whether the device has let it be known that one was."""
        return any(not skipped for (skipped,), _ in self.mail.collect())


_DOUBTS: Any = WeakTensorKeyDictionary()


def fresh(optimizer: Any, *, finite: bool | None) -> Fresh:
    """List the parameters whose momentum has not begun, or may not have.

    A group in which none has begun is left to torch, if all is known to be finite.
    """
    found: Fresh = []
    for group, params in _dampened(optimizer):
        buffers = [optimizer.state[param].get("momentum_buffer") for param in params]
        if not (finite and all(buffer is None for buffer in buffers)):
            pairs = zip(params, buffers, strict=True)
            found += [(param, group) for param, held in pairs if _new(param, held)]
    return found


def _dampened(optimizer: Any) -> Iterator[tuple[dict[str, Any], list[torch.Tensor]]]:
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        if group.get("fused") and group.get("momentum") and group.get("dampening"):
            yield group, [param for param in group["params"] if param.grad is not None]


def _new(param: torch.Tensor, buffer: torch.Tensor | None) -> bool:
    doubt = _DOUBTS.get(param)
    if doubt is not None and (buffer is not doubt.buffer or doubt.gone()):
        del _DOUBTS[param]  # by now it has begun, or another state was loaded
        doubt = None
    return buffer is None or doubt is not None


@torch.no_grad()
def step(
    optimizer: Any,
    some: Fresh,
    scale: torch.Tensor | None,
    found: torch.Tensor,
    *,
    finite: bool | None,
) -> None:
    """Step these parameters, where `found` is 0; `finite` is what the host knows."""
    for param, group in some:
        _step_one(optimizer.state[param], param, group, scale, found > 0)
        if finite:
            _DOUBTS.pop(param, None)


def _step_one(
    state: dict[str, Any],
    param: torch.Tensor,
    group: dict[str, Any],
    scale: torch.Tensor | None,
    found: torch.Tensor,
) -> None:
    grad: Any = param.grad
    skip = found.to(param.device, non_blocking=True)
    plain = grad if scale is None else grad / scale.to(param.device, non_blocking=True)
    along = -plain if group["maximize"] else plain
    if group["weight_decay"]:
        along = along.add(param, alpha=group["weight_decay"])
    buffer, doubt = along, _DOUBTS.get(param)
    if doubt is not None:
        going_on = doubt.buffer * group["momentum"] + along * (1 - group["dampening"])
        buffer = torch.where(doubt.never, along, going_on)
    old = torch.zeros_like(buffer) if doubt is None else doubt.buffer
    param.copy_(torch.where(skip, param, param - group["lr"] * buffer))
    grad.copy_(torch.where(skip, grad, plain))  # as the kernel does
    state["momentum_buffer"] = kept = torch.where(skip, old, buffer)
    never = skip if doubt is None else doubt.never & skip
    mail = Mailbox(every=1)
    mail.post(never.float().reshape(1))
    _DOUBTS[param] = _Doubt(kept, never, mail)
