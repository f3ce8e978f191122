"""Gather an optimizer's gradients, check and measure them in one pass, multiply them.

`take_survey` only reads; `multiply_` writes.  Results are 0-d tensors on the
scale's device, without host reads.
"""

import math
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import distributed as dist

from buoy._backends import torch as backend
from buoy._backends.torch import measure
from buoy._core.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "Bucket",
    "Gathered",
    "Survey",
    "check_and_multiply_",
    "clamp_",
    "gather",
    "gather_summed",
    "magnitudes",
    "multiply_",
    "parameters_of",
    "same_parameters",
    "take_survey",
]


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
    plain: bool = False  # dense float32, all on one device, no two of them the same

    @property
    def distinct(self) -> bool:
        """Whether no two parameters share one gradient."""
        return len(set(map(id, self.held))) == len(self.held)

    @property
    def sharded(self) -> bool:
        """Whether some gradients are parts of larger ones, on several ranks."""
        if self.grads is self.held:  # torch.distributed is not in use
            return False
        return any(map(_is_part, self.held))

    @property
    def half(self) -> bool:
        """Whether some gradients are FP16."""
        return any(bucket.dtype is torch.float16 for bucket in self.buckets)


class Survey(NamedTuple):
    """The findings about an optimizer's scaled gradients."""

    found: torch.Tensor  # float32 []: 1 if any would not be finite after unscaling
    norm: torch.Tensor | None = None  # float []: of all gradients, exact if finite
    # float []: the norm of each, in order of the parameters; sometimes stacked
    parts: tuple[torch.Tensor, ...] | torch.Tensor = ()
    amax: torch.Tensor | None = None  # float32 []: the largest magnitude


_ONE = torch.ones((), dtype=torch.float32, device="cpu")
_LARGE = 8192  # elements per gradient above which a sum beats the amp kernel
_FLOAT = torch.float32
_DENSE_TYPES = frozenset({torch.float32, torch.bfloat16, torch.float64})
_STRIDED = torch.strided
_DISTRIBUTED = dist.is_available()
_numel = torch.Tensor.numel


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


def gather(optimizer: Any) -> Gathered:
    """Collect the gradients of all parameter groups, sorted by device and dtype."""
    params: list[Any] = parameters_of(optimizer)
    plain = held = _plain_gradients(params)
    if held is None:
        params = [param for param in params if param.grad is not None]
        plain = held = _plain_gradients(params)
    if held is None:
        held = [param.grad for param in params]
    grads = held
    if _DISTRIBUTED and dist.is_initialized():
        grads = [_local_part(param) for param in params]  # replaces partial gradients
        held = [param.grad for param in params]
    if plain is not None:
        buckets = [Bucket(held[0].device, _FLOAT, grads)]
        return Gathered(params, held, grads, buckets, True)
    grads = list(grads)
    for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
        if grad.dtype not in _DENSE_TYPES or grad.layout is not _STRIDED:
            grads[i] = _real_and_dense(param, grad)
    return _sorted(params, grads)


def _plain_gradients(params: list[Any]) -> list[Any] | None:
    """Return the gradients if all are there, dense float32, on one device, distinct."""
    first = params[0].grad if params else None
    if first is None or torch.compiler.is_dynamo_compiling():  # a graph must not use id
        return None
    home, on_cpu = first.device, first.is_cpu
    found = {}  # by id: cheaper than to compare the ids of a list
    for param in params:
        grad = param.grad
        if grad is None or grad.dtype is not _FLOAT or grad.layout is not _STRIDED:
            return None
        if not (grad.is_cpu if on_cpu else grad.device == home):
            return None
        found[id(grad)] = grad
    return list(found.values()) if len(found) == len(params) else None


def _local_part(param: Any) -> torch.Tensor:
    """Return this rank's part of a gradient, in the parameter's layout."""
    grad: Any = param.grad
    placements = getattr(grad, "placements", None)
    if placements is None:
        return grad  # type: ignore[no-any-return]
    if any(placement.is_partial() for placement in placements):
        # A partial gradient: reduce it, then take the local part.
        param.grad = grad = grad.redistribute(placements=param.placements)
    part: torch.Tensor = grad.to_local()
    return part


def _is_part(grad: Any) -> bool:
    """Return whether a gradient is a DTensor that several ranks hold parts of."""
    placements = getattr(grad, "placements", ())
    split = any(not placement.is_replicate() for placement in placements)
    return split and grad.device_mesh.size() > 1


def _real_and_dense(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    if grad.is_sparse:
        # Duplicate entries of an FP16 gradient may overflow only once they are added.
        if grad.dtype is torch.float16:
            param.grad = grad = grad.coalesce()
        grad = grad._values()
    return torch.view_as_real(grad) if grad.is_complex() else grad


def _sorted(params: list[Any], grads: list[torch.Tensor]) -> Gathered:
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for grad in grads:
        kinds.setdefault((grad.device, grad.dtype), []).append(grad)
    buckets = [Bucket(*kind, some) for kind, some in kinds.items()]
    return Gathered(params, [param.grad for param in params], grads, buckets)


def gather_summed(optimizer: Any) -> Gathered:
    """Gather gradients after summing duplicate rows of sparse ones.

    The norm and the largest value of a sparse gradient are defined after the sum.
    """
    gathered = gather(optimizer)
    if gathered.plain:
        return gathered
    changed = False
    for param in gathered.params:
        grad = param.grad
        if grad is not None and grad.is_sparse and not grad.is_coalesced():
            param.grad, changed = grad.coalesce(), True
    return gather(optimizer) if changed else gathered


def magnitudes(gathered: Gathered, order: float) -> Gathered:
    """Replace complex gradients by their magnitudes, if the order is not 2."""
    if gathered.plain or order == 2.0:
        return gathered
    if not any(param.is_complex() for param in gathered.params):
        return gathered
    sizes = [
        torch.view_as_complex(grad).abs() if param.is_complex() else grad
        for param, grad in zip(gathered.params, gathered.grads, strict=True)
    ]
    return _sorted(gathered.params, sizes)


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


# -- inspecting ------------------------------------------------------------------------


def take_survey(
    gathered: Gathered,
    inverse: torch.Tensor,
    *,
    order: float | None = None,
    amax: bool = False,
    safe: bool = False,
) -> Survey:
    """Check the gradients and measure them in one pass.

    Args:
        gathered: the gradients, multiplied by the scale.
        inverse: 1 / scale.
        order: the order of the norm; None for no norm.
        amax: whether to measure the largest magnitude.
        safe: whether dividing by the scale cannot overflow (the scale is at least 1).
    """
    if not gathered.grads:
        zero = torch.zeros_like(inverse)
        return Survey(zero, None if order is None else zero)
    if order is None and amax:
        return _largest(gathered, inverse)
    if order is None:
        return Survey(_check(gathered, inverse, safe=safe))
    return _measure(gathered, order, inverse, amax=amax)


def _check(gathered: Gathered, inverse: torch.Tensor, *, safe: bool) -> torch.Tensor:
    """Check without writing.  float32 []."""
    if gathered.plain and safe and gathered.grads[0].is_cpu and inverse.is_cpu:
        return _check_on_cpu(gathered.buckets[0])
    flags = []
    for bucket in gathered.buckets:
        if bucket.device.type == "cpu" and (safe or not _exceeds_one(inverse)):
            flag = _check_on_cpu(bucket)
        else:
            factor = inverse.to(bucket.device, non_blocking=True)
            flag = backend.nonfinite(backend.amax(bucket.grads) * factor).float()
        if bucket.device != inverse.device:
            flag = flag.to(inverse.device, non_blocking=True)
        flags.append(flag)
    return flags[0] if len(flags) == 1 else torch.stack(flags).max()


def recheck(optimizer: Any, flags: dict[torch.device, torch.Tensor]) -> None:
    """Check gradients again: raise their flags if one is non-finite now.

    Not with ranks, which may have agreed on these flags already.
    """
    if _DISTRIBUTED and dist.is_initialized():
        return
    for device, flag in flags.items():
        found = take_survey(gather(optimizer), torch.ones_like(flag), safe=True).found
        flags[device] = torch.maximum(flag, found)


def _exceeds_one(factor: torch.Tensor) -> bool:
    """Return whether a factor may be above 1; False only if the host can read it."""
    seen = backend.host_value(factor)
    return seen is None or not seen <= 1.0


def _check_on_cpu(bucket: Bucket) -> torch.Tensor:
    _, dtype, grads = bucket
    flag = torch.zeros_like(_ONE)
    plain = dtype is torch.float32 and type(grads[0]) is torch.Tensor
    if plain and sum(map(_numel, grads)) > _LARGE * len(grads):
        # The cheapest check: an inf or NaN makes the sum non-finite.
        total = backend.host_value(torch.stack([grad.sum() for grad in grads]).sum())
        if total is not None and math.isfinite(total):
            return flag
    backend.check_and_multiply_(grads, flag, _ONE)
    return flag


def _measure(
    gathered: Gathered, order: float, inverse: torch.Tensor, *, amax: bool
) -> Survey:
    """Compute the norm of all gradients, and derive the check from it."""
    home = inverse.device
    at_home = gathered.plain and gathered.buckets[0].device == home
    if at_home and home.type == "cpu":
        return _measure_on_host(gathered.grads, order, inverse, amax=amax)
    parts: dict[tuple[torch.device, torch.dtype], Iterator[torch.Tensor]] = {}
    totals, sizes, tops = [], [], []
    for device, dtype, grads in gathered.buckets:
        some, top = measure.norms(grads, order, amax=amax)
        total = torch.linalg.vector_norm(torch.stack(some), order)
        total, biggest = measure.settled(grads, order, total, top)
        totals.append(total.to(home, non_blocking=True))
        sizes.append(biggest.to(home, non_blocking=True))
        if top is not None:
            tops.append(top.to(home, non_blocking=True))
        parts[device, dtype] = iter(some)
    norm = totals[0]
    if len(totals) > 1:
        norm = torch.linalg.vector_norm(torch.stack(totals), order)
    found = measure.overflows(sizes, inverse)
    # Not by `id`: torch.compile would recompile for every gradient.
    each = tuple(next(parts[grad.device, grad.dtype]) for grad in gathered.grads)
    return Survey(found, norm, each, torch.stack(tops).max().float() if tops else None)


def _measure_on_host(
    grads: list[torch.Tensor], order: float, inverse: torch.Tensor, *, amax: bool
) -> Survey:
    """Do the same for float32 in host memory, where reading the check is free."""
    some, top = measure.norms(grads, order, amax=amax)
    parts = torch.stack(some)
    total = torch.linalg.vector_norm(parts, order)
    norm, biggest = measure.settled(grads, order, total, top)
    return Survey(measure.overflows([biggest], inverse), norm, parts, top)


def _largest(gathered: Gathered, inverse: torch.Tensor) -> Survey:
    """Measure the largest magnitude, and derive the check from it."""
    sizes = [
        measure.biggest(grads).to(inverse.device, non_blocking=True)
        for _, _, grads in gathered.buckets
    ]
    top = sizes[0] if len(sizes) == 1 else torch.stack(sizes).max()
    return Survey(measure.overflows(sizes, inverse), amax=top.float())


# -- writing ---------------------------------------------------------------------------


def check_and_multiply_(
    gathered: Gathered, inverse: torch.Tensor, found: torch.Tensor, *, safe: bool
) -> dict[torch.device, torch.Tensor]:
    """Check and unscale in one pass, by torch's kernel; return a flag per device.

    With a scale below 1, which may overflow, the result is checked again.
    """
    flags: dict[torch.device, torch.Tensor] = {}
    home = found.device
    for device, _, grads in gathered.buckets:
        flag, factor = found, inverse
        if device != home:
            factor = inverse.to(device, non_blocking=True)
            flag = flags.get(device, found).to(device, non_blocking=True)
        flags[device] = flag
        backend.check_and_multiply_(grads, flag, factor)
        if not safe and _exceeds_one(factor):
            backend.check_and_multiply_(grads, flag, torch.ones_like(factor))
    return flags


def multiply_(gathered: Gathered, factor: torch.Tensor) -> None:
    """Multiply every gradient in place; by the root of a float64 factor, twice."""
    for device, dtype, grads in gathered.buckets:
        times = factor.to(device, non_blocking=True)
        if factor.dtype is torch.float64 is not dtype:  # may be below float32's range
            times = times.sqrt().float()
            backend.multiply_(grads, times)
        backend.multiply_(grads, times)


def clamp_(gathered: Gathered, limit: float) -> None:
    """Clamp every gradient in place to [-limit, limit]."""
    for _, _, grads in gathered.buckets:
        torch._foreach_clamp_min_(grads, -limit)
        torch._foreach_clamp_max_(grads, limit)
