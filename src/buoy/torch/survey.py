"""The one look at the gradients: are they finite, how large, and which are not.

Every function takes what `gather` found and returns 0-d tensors on the scale's device;
nothing is read on the host.
"""

import math
from typing import Any, NamedTuple

import torch

from buoy._backends import torch as backend
from buoy.torch.gather import Bucket, Gathered, gather, owners

__all__ = [
    "Survey",
    "check",
    "clipping",
    "largest",
    "measure",
    "offenders",
    "seen_by_host",
    "underflow",
    "unscale",
]


class Survey(NamedTuple):
    """What the gradients showed.  Numbers are of the scaled gradients."""

    found: torch.Tensor  # float32 []: 1 if any would not be finite after unscaling
    norm: torch.Tensor | None = None  # float []: of all, exact where finite
    # float []: of each, in order of the owners; stacked where that was done anyway
    parts: tuple[torch.Tensor, ...] | torch.Tensor = ()
    amax: torch.Tensor | None = None  # float32 []: the largest magnitude


_ONE = torch.ones((), dtype=torch.float32, device="cpu")
_TINY = 1e-6  # torch's own guard against dividing by zero
_FLOAT32_MAX = torch.finfo(torch.float32).max
_LARGE = 8192  # elements per gradient from which on summing beats the amp kernel


def seen_by_host(number: torch.Tensor) -> float | None:
    """Tell a number's value if the host can see it without asking a device.

    Everything below works without: on a device that has to be asked, more is computed
    instead of deciding.
    """
    return backend.peek(number) if backend.in_host_memory(number) else None


def _exceeds_one(factor: torch.Tensor) -> bool:
    """Say whether a factor may be above 1: no only if the host sees that it is not."""
    seen = seen_by_host(factor)
    return seen is None or not seen <= 1.0


def unscale(
    buckets: list[Bucket],
    inverse: dict[torch.device, torch.Tensor],
    found: dict[torch.device, torch.Tensor],
    *,
    check_result: bool,
) -> None:
    """Check and unscale in one pass; check again what a scale below 1 made of it."""
    for device, _, grads in buckets:
        flag, factor = found[device], inverse[device]
        backend.check_and_multiply_(grads, flag, factor)
        if check_result and _exceeds_one(factor):
            backend.check_and_multiply_(grads, flag, torch.ones_like(factor))


def check(
    gathered: Gathered, inverse: torch.Tensor, *, check_result: bool
) -> dict[torch.device, torch.Tensor]:
    """Check without writing, for optimizers that unscale by themselves."""
    found: dict[torch.device, torch.Tensor] = {}
    for bucket in gathered.buckets:
        factor = inverse.to(bucket.device, non_blocking=True)
        if bucket.device.type != "cpu" or (check_result and _exceeds_one(factor)):
            flag = backend.nonfinite(backend.amax(bucket.grads) * factor).float()
        else:
            flag = _check_on_cpu(bucket)
        held = found.get(bucket.device)
        found[bucket.device] = flag if held is None else torch.maximum(held, flag)
    return found


def _check_on_cpu(bucket: Bucket) -> torch.Tensor:
    _, dtype, grads = bucket
    flag = torch.zeros_like(_ONE)
    plain = dtype is torch.float32 and type(grads[0]) is torch.Tensor
    if plain and sum(map(_numel, grads)) > _LARGE * len(grads):
        total = seen_by_host(torch.stack(backend.sums(grads)).sum())
        if total is not None and math.isfinite(total):
            return flag
    backend.check_and_multiply_(grads, flag, _ONE)
    return flag


_numel = torch.Tensor.numel


def measure(gathered: Gathered, order: float, inverse: torch.Tensor) -> Survey:
    """Take the norm of all gradients, and the check from it."""
    if not gathered.grads:
        return Survey(torch.zeros_like(inverse), torch.zeros_like(inverse))
    home = inverse.device
    at_home = gathered.plain and gathered.buckets[0].device == home
    if at_home and backend.in_host_memory(inverse):
        return _measure_plainly(gathered.grads, order, inverse)
    parts: dict[int, torch.Tensor] = {}
    totals, sizes = [], []
    for _, _, grads in gathered.buckets:
        some = backend.norms(grads, order)
        total = backend.whole(torch.linalg.vector_norm(torch.stack(some), order))
        total, biggest = _settled(grads, order, total)
        totals.append(total.to(home, non_blocking=True))
        sizes.append(biggest.to(home, non_blocking=True))
        parts.update(zip(map(id, grads), some, strict=True))
    norm = totals[0]
    if len(totals) > 1:
        norm = torch.linalg.vector_norm(torch.stack(totals), order)
    found = _overflows(sizes, inverse)
    ordered = tuple(parts[id(grad)] for grad in gathered.grads)
    return Survey(found=found, norm=norm, parts=ordered)


def _measure_plainly(
    grads: list[torch.Tensor], order: float, inverse: torch.Tensor
) -> Survey:
    """Do the same for float32 in the host's memory, where the check costs nothing."""
    parts = torch.stack(backend.norms(grads, order))
    total = backend.whole(torch.linalg.vector_norm(parts, order))
    norm, biggest = _settled(grads, order, total)
    size = seen_by_host(biggest)
    if size is None:
        found = _overflows([biggest], inverse)
    else:
        times = size * backend.peek(inverse)  # NaN for 0 * inf, which fits nowhere
        fits = size <= _FLOAT32_MAX and times <= _FLOAT32_MAX
        found = torch.zeros_like(inverse) if fits else torch.ones_like(inverse)
    return Survey(found=found, norm=norm, parts=parts)


def _settled(
    grads: list[torch.Tensor], order: float, total: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the exact total, and a number that is finite iff all elements are."""
    if order == math.inf:
        return total, total
    if order <= 0.0:  # such a norm may be finite though an element is not
        return total, _biggest(grads)
    seen = seen_by_host(total)
    if seen is not None:
        if math.isfinite(seen):
            return total, total
        return backend.whole(backend.exact_norm(grads, order)), _biggest(grads)
    biggest = _biggest(grads)
    # Without float64 the norm of a finite overflow is bounded from above: such a step
    # is clipped harder than need be, and is not called non-finite.
    count = float(sum(grad.numel() for grad in grads))
    bound = biggest * count ** (1.0 / order)
    return torch.where(backend.nonfinite(total), bound, total), biggest


def _biggest(grads: list[torch.Tensor]) -> torch.Tensor:
    """Find the largest magnitude on this rank, in float32 or wider; inf and NaN win."""
    return torch.stack(backend.norms(list(map(backend.local, grads)), math.inf)).max()


def clipping(norm: torch.Tensor, max_norm: float | torch.Tensor) -> torch.Tensor:
    """Give what gradients of this norm are multiplied by; 1 if it is small enough."""
    if not isinstance(max_norm, torch.Tensor):
        if max_norm == math.inf:
            return torch.ones_like(norm)  # a bound of a norm may be inf: see `_settled`
        return (max_norm / (norm + _TINY)).clamp(max=1.0)
    return (max_norm / (norm + _TINY)).clamp(max=1.0).nan_to_num(nan=1.0)


def _overflows(sizes: list[torch.Tensor], inverse: torch.Tensor) -> torch.Tensor:
    """Say whether a size is non-finite, or would be once unscaled.  float32 [].

    Each in its own dtype: no number of float64 is a limit that float32 can be held to.
    """
    bad = [
        backend.nonfinite(torch.maximum(size, size * inverse.to(size.dtype)))
        for size in sizes
    ]
    return (bad[0] if len(bad) == 1 else torch.stack(bad).any()).float()


def largest(gathered: Gathered, inverse: torch.Tensor) -> Survey:
    """Find the largest magnitude, and the check from it."""
    sizes = [
        _biggest(grads).to(inverse.device, non_blocking=True)
        for _, _, grads in gathered.buckets
    ]
    found = _overflows(sizes, inverse)
    return Survey(found=found, amax=torch.stack(sizes).max().float())


def offenders(optimizer: Any) -> list[torch.Tensor]:
    """Find the parameters whose gradients are not finite.  Reads on the host.

    Of gradients that ranks share only this rank's part is looked at: who asks may be
    one rank alone.
    """
    grads = gather(optimizer).grads
    bad = backend.read([backend.nonfinite(backend.magnitude(g)) for g in grads])
    return [p for p, flag in zip(owners(optimizer), bad, strict=True) if flag]


def underflow(gathered: Gathered, home: torch.device) -> torch.Tensor:
    """Tell which share of the nonzero scaled gradients is about to underflow."""
    shares = [
        backend.small_share(grads).to(home, non_blocking=True)
        for _, _, grads in gathered.buckets
    ]
    return torch.stack(shares).mean()
