"""Find an optimizer's gradients, as flat lists that one kernel call can take.

Sparse gradients appear as their values, complex ones as pairs of reals, DTensors as
this rank's part: what is found shares memory with `.grad`, so multiplying it
multiplies the gradient.
"""

from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from buoy.torch.errors import UnknownOptimizerError

__all__ = [
    "Bucket",
    "Gathered",
    "add_up_sparse",
    "gather",
    "local_grad",
    "owners",
    "parameters_of",
    "sorted_by_kind",
]


class Bucket(NamedTuple):
    """Gradients of one device and one dtype."""

    device: torch.device
    dtype: torch.dtype
    grads: list[torch.Tensor]


class Gathered(NamedTuple):
    """Everything an optimizer has to step by."""

    grads: list[torch.Tensor]  # real and dense, in the order of the parameters
    buckets: list[Bucket]
    plain: bool = False  # dense float32, all on one device


_FLOAT = torch.float32
_PLAIN = frozenset({torch.float32, torch.bfloat16, torch.float64})
_STRIDED = torch.strided
_SHARED = dist.is_available()


def gather(optimizer: Any) -> Gathered:
    """Walk the parameters once and sort their gradients by device and dtype."""
    grads = [
        grad
        for group in _groups(optimizer)
        for param in group["params"]
        if (grad := param.grad) is not None
    ]
    if _SHARED and dist.is_initialized():
        grads = [_part(param) for param in owners(optimizer)]
    if _ordinary(grads):
        return Gathered(grads, [Bucket(grads[0].device, _FLOAT, grads)], plain=True)
    for i, (param, grad) in enumerate(zip(owners(optimizer), grads, strict=True)):
        if grad.dtype not in _PLAIN or grad.layout is not _STRIDED:
            grads[i] = _real_and_dense(param, grad)
    return sorted_by_kind(grads)


def add_up_sparse(optimizer: Any) -> None:
    """Add duplicate rows of sparse gradients up: a norm is that of their sum."""
    for param in owners(optimizer):
        grad = param.grad
        if grad is not None and grad.is_sparse and not grad.is_coalesced():
            param.grad = grad.coalesce()


def _ordinary(grads: list[torch.Tensor]) -> bool:
    """Say whether all are dense float32 on one device: the case to be quick about."""
    if not grads:
        return False
    home = grads[0].device
    on_cpu = home.type == "cpu"
    for grad in grads:
        if grad.dtype is not _FLOAT or grad.layout is not _STRIDED:
            return False
        if not (grad.is_cpu if on_cpu else grad.device == home):
            return False
    return True


def local_grad(param: torch.Tensor) -> torch.Tensor | None:
    """Give this rank's part of a gradient, dense and real."""
    if param.grad is None:
        return None
    return _real_and_dense(param, _part(param))


def _part(param: Any) -> torch.Tensor:
    """Take this rank's part of a gradient."""
    grad: Any = param.grad
    placements = getattr(grad, "placements", None)
    if placements is None:
        return grad  # type: ignore[no-any-return]
    if any(placement.is_partial() for placement in placements):
        # Each rank holds a summand: what counts is the sum, in the parameter's layout.
        param.grad = grad = grad.redistribute(placements=param.placements)
    part: torch.Tensor = grad.to_local()
    return part


def owners(optimizer: Any, count: int | None = None) -> list[torch.Tensor]:
    """List the parameters that have a gradient, in the order of `Gathered.grads`.

    If they are known to be as many as there are parameters, nobody has to ask.
    """
    held = parameters_of(optimizer)
    if len(held) == count:
        return held
    return [param for param in held if param.grad is not None]


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    """List every parameter that an optimizer holds."""
    return [param for group in _groups(optimizer) for param in group["params"]]


def _groups(optimizer: Any) -> Any:
    try:
        return optimizer.param_groups
    except AttributeError:
        message = (
            f"'{type(optimizer).__name__}' object has no attribute 'param_groups': it "
            "is not an optimizer, and the scaler would not know whose gradients to "
            "check. Pass the torch.optim.Optimizer itself, or a wrapper that exposes "
            "its `param_groups`."
        )
        raise UnknownOptimizerError(message) from None


def _real_and_dense(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    if grad.is_sparse:
        # Duplicate entries of an FP16 gradient may overflow only once they are added.
        if grad.dtype is torch.float16:
            param.grad = grad = grad.coalesce()
        grad = grad._values()
    return torch.view_as_real(grad) if grad.is_complex() else grad


def sorted_by_kind(grads: list[torch.Tensor]) -> Gathered:
    """Sort gradients by device and dtype."""
    found: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for grad in grads:
        found.setdefault((grad.device, grad.dtype), []).append(grad)
    return Gathered(grads, [Bucket(*kind, some) for kind, some in found.items()])
