"""Gather an optimizer's gradients, sorted for kernels; multiply and clamp them."""

from operator import is_
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from buoy._backends import torch as backend
from buoy._core.errors import OptionError

__all__ = [
    "Bucket",
    "Flags",
    "Gathered",
    "clamp_",
    "first_gradient",
    "gather",
    "magnitudes",
    "multiply_",
    "parameters_of",
    "same_parameters",
    "unscale_",
]

Flags = dict[torch.device, torch.Tensor]  # float32 []: 1 if a gradient was not finite

_DENSE_TYPES = frozenset({torch.float32, torch.bfloat16, torch.float64})
_DISTRIBUTED = dist.is_available()


class Bucket(NamedTuple):
    """Gradients of one device and one dtype, for one kernel call."""

    device: torch.device
    dtype: torch.dtype
    grads: list[torch.Tensor]


class Gathered(NamedTuple):
    """All gradients of an optimizer, real and dense, and their parameters.

    Sparse gradients are represented by their values, complex ones by pairs of reals,
    DTensors by this rank's part.  All share memory with `.grad`.
    """

    params: list[torch.Tensor]
    held: list[torch.Tensor]  # the `.grad` of each, as it is
    grads: list[torch.Tensor]
    buckets: list[Bucket]
    sharded: bool = False  # some are parts of larger ones, on several ranks

    @property
    def distinct(self) -> bool:
        """Whether no two parameters share one gradient."""
        return len(set(map(id, self.held))) == len(self.held)

    @property
    def half(self) -> bool:
        """Whether some gradients are FP16."""
        return any(bucket.dtype is torch.float16 for bucket in self.buckets)


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    """Return the parameters of all parameter groups of an optimizer."""
    try:
        groups = optimizer.param_groups
    except AttributeError:
        message = (
            f"'{type(optimizer).__name__}' object has no attribute 'param_groups': it "
            "is not an optimizer, so its gradients cannot be checked. Pass the "
            "torch.optim.Optimizer itself, or a wrapper that has its `param_groups`."
        )
        raise OptionError(message) from None
    found: list[torch.Tensor] = []
    for group in groups:
        found += group["params"]
    return found


# -- gathering -------------------------------------------------------------------------


def gather(optimizer: Any, *, summed: bool = False) -> Gathered:
    """Collect the gradients of all parameter groups, sorted by device and dtype.

    `summed`: duplicate rows of sparse gradients are summed first, in place.  The norm
    and the largest value of a sparse gradient are defined after the sum.
    """
    params: list[Any] = parameters_of(optimizer)
    held = [param.grad for param in params]
    if any(grad is None for grad in held):
        params = [param for param in params if param.grad is not None]
        held = [param.grad for param in params]
    if _DISTRIBUTED and dist.is_initialized() and any(map(_is_partial, held)):
        for param in params:
            _reduce(param)
        held = [param.grad for param in params]
    kinds = {(type(grad), grad.device, grad.dtype, grad.layout) for grad in held}
    if len(kinds) == 1:  # nearly always: kernels can take them as they are
        ((kind, device, dtype, layout),) = kinds
        if kind is torch.Tensor and layout is torch.strided and dtype in _DENSE_TYPES:
            return Gathered(params, held, held, [Bucket(device, dtype, held)])
    held = [_coalesced(param, summed=summed) for param in params]
    grads = [_real_and_dense(grad) for grad in held]
    sharded = any(map(_is_part, held))
    return Gathered(params, held, grads, _buckets(grads), sharded)


def _is_partial(grad: Any) -> bool:
    """Return whether a DTensor is still a sum of parts on several ranks."""
    placements = getattr(grad, "placements", ())
    return any(placement.is_partial() for placement in placements)


def _reduce(param: Any) -> None:
    """Add up the parts of a gradient."""
    if _is_partial(param.grad):
        param.grad = param.grad.redistribute(placements=param.placements)


def _coalesced(param: torch.Tensor, *, summed: bool) -> torch.Tensor:
    """Return a parameter's gradient, with duplicate rows summed where that matters.

    Duplicate rows of an FP16 gradient may overflow only once they are added.
    """
    grad: Any = param.grad
    sums = summed or grad.dtype is torch.float16
    if grad.is_sparse and sums and not grad.is_coalesced():
        param.grad = grad = grad.coalesce()
    return grad  # type: ignore[no-any-return]


def _real_and_dense(grad: torch.Tensor) -> torch.Tensor:
    """Return a view of a gradient's own numbers, on this rank."""
    if type(grad) is not torch.Tensor:
        grad = backend.local(grad)
    if grad.is_sparse:
        grad = grad._values()
    return torch.view_as_real(grad) if grad.is_complex() else grad


def _is_part(grad: Any) -> bool:
    """Return whether a gradient is a DTensor that several ranks hold parts of."""
    placements = getattr(grad, "placements", ())
    split = any(not placement.is_replicate() for placement in placements)
    return split and grad.device_mesh.size() > 1


def _buckets(grads: list[torch.Tensor]) -> list[Bucket]:
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for grad in grads:
        kinds.setdefault((grad.device, grad.dtype), []).append(grad)
    return [Bucket(device, dtype, some) for (device, dtype), some in kinds.items()]


def magnitudes(gathered: Gathered, order: float) -> Gathered:
    """Replace complex gradients by their magnitudes, if the order is not 2."""
    if order == 2.0 or not any(param.is_complex() for param in gathered.params):
        return gathered
    sizes = [
        torch.view_as_complex(grad).abs() if param.is_complex() else grad
        for param, grad in zip(gathered.params, gathered.grads, strict=True)
    ]
    return gathered._replace(grads=sizes, buckets=_buckets(sizes))


def first_gradient(optimizer: Any) -> torch.Tensor | None:
    """Return the first gradient that there is."""
    grads = (param.grad for param in parameters_of(optimizer))
    return next((grad for grad in grads if grad is not None), None)


def same_parameters(optimizer: Any, seen: list[torch.Tensor]) -> bool:
    """Return whether every parameter that has a gradient now is in `seen`."""
    now = parameters_of(optimizer)
    if len(now) == len(seen) and all(map(is_, now, seen)):
        return True
    known = set(map(id, seen))
    return all(id(param) in known for param in now if param.grad is not None)


# -- writing ---------------------------------------------------------------------------


def unscale_(
    gathered: Gathered,
    inverse: torch.Tensor,
    found: torch.Tensor,
    *,
    may_overflow: bool,
) -> Flags:
    """Check and multiply by `inverse` in one pass, by torch's kernel.

    Returns a flag per device; `found` is that of its own device.  `may_overflow`: the
    result is checked again, as multiplying may make a finite gradient infinite.
    """
    flags: Flags = {}
    for device, _, grads in gathered.buckets:
        factor = inverse.to(device, non_blocking=True)
        if device not in flags:
            at_home = device == found.device
            flags[device] = found if at_home else found.to(device, non_blocking=True)
        backend.check_and_multiply_(grads, flags[device], factor)
        if may_overflow:
            backend.check_and_multiply_(grads, flags[device], torch.ones_like(factor))
    return flags


def multiply_(gathered: Gathered, factor: torch.Tensor) -> None:
    """Multiply every gradient in place."""
    for device, _, grads in gathered.buckets:
        backend.multiply_(grads, factor.to(device, non_blocking=True))


def clamp_(gathered: Gathered, limit: float) -> None:
    """Clamp every gradient in place to [-limit, limit]."""
    for _, _, grads in gathered.buckets:
        torch._foreach_clamp_min_(grads, -limit)
        torch._foreach_clamp_max_(grads, limit)
