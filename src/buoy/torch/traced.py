"""A whole step as one graph: what `torch.compile(fullgraph=True)` can trace.

Nothing is asked, nothing is told, nothing depends on a value: the same survey, the
same policy and the same selection as in device mode, without the bookkeeping.  After
such a step `last_step` is None, and gates are not advanced: both belong to the host.
"""

from typing import TYPE_CHECKING, Any

import torch

from buoy._backends import torch as backend
from buoy.torch import words
from buoy.torch.errors import DeviceModeError
from buoy.torch.gather import owners
from buoy.torch.rule import Evidence
from buoy.torch.select import selected_step

if TYPE_CHECKING:
    from buoy.torch.report import Reporting

__all__ = ["clip", "scale", "step", "update"]

_TINY = 1e-6


def scale(scaler: "Reporting", output: torch.Tensor) -> torch.Tensor:
    """Multiply by the scale, made on first use."""
    if scaler._scale is None:
        device = output.device
        scaler._scale = torch.full((), scaler._init_scale, device=device)
        count = scaler._init_growth_tracker
        scaler._growth_tracker = torch.full((), count, dtype=torch.int32, device=device)
    scaler._rule.foresee(scaler, output.reshape(()))
    return output * scaler._scale


def _grads(optimizer: Any) -> list[torch.Tensor]:
    found: list[Any] = [param.grad for param in owners(optimizer)]
    return found


def _bare(optimizer: Any) -> Any:
    """Take the step without torch's wrappers, one of which breaks the graph."""
    bare = type(optimizer).step
    while hasattr(bare, "__wrapped__"):
        bare = bare.__wrapped__
    return bare


def _refuse(optimizer: Any) -> None:
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        message = (
            f"torch.compile does not trace into fused {type(optimizer).__name__}. "
            "Build it with `fused=False`: the compiler fuses it; or leave "
            "`scaler.step` out "
            "of the compiled function."
        )
        raise DeviceModeError(message)
    plain = isinstance(optimizer, torch.optim.SGD) and not any(
        group["momentum"] for group in optimizer.param_groups
    )
    if not plain and not optimizer.state:
        message = (
            f"{type(optimizer).__name__} makes its state on its first step, which "
            "cannot be traced and undone. Take one step without torch.compile first."
        )
        raise DeviceModeError(message)


def _inverse(scaler: "Reporting") -> torch.Tensor:
    return scaler._home_scale().reciprocal()


@torch.no_grad()
def clip(
    scaler: "Reporting", optimizer: Any, max_norm: float, order: float
) -> torch.Tensor:
    """Note the multiplier that unscales and clips; return the unscaled norm."""
    grads = _grads(optimizer)
    inverse = _inverse(scaler)
    norm = torch.linalg.vector_norm(torch.stack(backend.norms(grads, order)), order)
    largest = backend.amax(grads)
    count = float(sum(grad.numel() for grad in grads))
    bound = largest * count ** (1.0 / order)
    norm = torch.where(backend.nonfinite(norm), bound, norm) * inverse
    coefficient = torch.clamp(max_norm / (norm + _TINY), max=1.0)
    found = backend.nonfinite(largest * inverse).float()
    scaler._noted = (found, inverse * coefficient, largest)
    return norm


@torch.no_grad()
def step(scaler: "Reporting", optimizer: Any) -> None:
    """Step; put back what must not count."""
    _refuse(optimizer)
    grads = _grads(optimizer)
    if scaler._noted is None:
        inverse, largest = _inverse(scaler), backend.amax(grads)
        found = backend.nonfinite(largest * inverse).float()
        scaler._noted = (found, inverse, largest)
    found, multiplier, largest = scaler._noted
    torch._foreach_mul_(grads, multiplier)
    selected_step(optimizer, found, (optimizer,), {}, step=_bare(optimizer))
    scaler._noted = None
    scaler._traced = (
        (found, largest)
        if scaler._traced is None
        else (scaler._traced[0] + found, torch.maximum(scaler._traced[1], largest))
    )


@torch.no_grad()
def update(scaler: "Reporting") -> None:
    """Move the scale."""
    if scaler._traced is None:
        raise words.nothing_recorded()
    found, largest = scaler._traced
    scaler._traced = None
    scaler._rule.move(scaler, Evidence(found, amax=largest))
