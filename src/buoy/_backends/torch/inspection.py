"""Read an optimizer's gradients once: are they finite, and how large are they?

`inspect` only reads, eagerly and in compiled graphs.  Its results are 0-d tensors on
the scale's device.
"""

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from buoy._backends import torch as backend
from buoy._backends.torch import measure
from buoy._backends.torch.gradients import Bucket, Gathered, magnitudes
from buoy._core.formats import FLOAT32_MAX
from buoy._core.step import bounded_norm

__all__ = ["AMAX", "Survey", "inspect"]

# The name of the largest magnitude in `Policy.wants`.  Surveys have the magnitude
# itself; policies get its logarithm (`Measurement.in_log2`).
AMAX = "amax_log2"
_LARGE = 8192  # elements per gradient above which a sum is faster than torch's kernel


class Survey(NamedTuple):
    """The findings about an optimizer's gradients, as they were when they were read."""

    found: torch.Tensor  # float32 []: 1 if any would not be finite after unscaling
    measured: dict[str, torch.Tensor]  # float32 [], by the names in `Policy.wants`
    empty: bool = False  # there were no gradients
    norm: torch.Tensor | None = None  # float32 []: of all; None: not measured
    parts: Sequence[torch.Tensor] = ()  # float []: the norm of each


def inspect(
    gathered: Gathered,
    inverse: torch.Tensor,
    *,
    order: float | None = None,
    wanted: Collection[str] = (),
    may_overflow: bool = True,
    may_read: bool = False,
) -> Survey:
    """Check the gradients and measure them in one pass.

    Args:
        gathered: the gradients, multiplied by the scale.
        inverse: 1 / scale.
        order: the order of the norm; None for no norm.
        wanted: what else is measured, by the names in `Policy.wants`.
        may_overflow: whether dividing by the scale can overflow: it may be below 1.
        may_read: whether the host reads a number for free: all is in its memory.

    Example:
        >>> from buoy._backends.torch.gradients import gather
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> gathered = gather(torch.optim.SGD([weight]))
        >>> survey = inspect(gathered, torch.tensor(0.5), order=2.0, wanted=[AMAX])
        >>> survey.found.item(), survey.norm.item(), survey.measured[AMAX].item()
        (0.0, 5.0, 4.0)
    """
    if not gathered.grads:
        zero = torch.zeros_like(inverse)
        return Survey(zero, {}, empty=True, norm=None if order is None else zero)
    home = inverse.device
    measured = {
        name: measure.MEASURE[name](gathered, home) for name in wanted if name != AMAX
    }
    if order is not None:
        survey = _measure(
            magnitudes(gathered, order),
            inverse,
            order,
            amax=AMAX in wanted,
            may_read=may_read,
        )
    elif AMAX in wanted or may_overflow or home.type != "cpu":
        survey = _measure_largest(gathered.buckets, inverse, may_read=may_read)
    else:
        survey = _check(gathered.buckets, home)
    found = {name: x for name, x in survey.measured.items() if name in wanted}
    return survey._replace(measured=found | measured)


def _measure(
    gathered: Gathered,
    inverse: torch.Tensor,
    order: float,
    *,
    amax: bool,
    may_read: bool,
) -> Survey:
    """Compute the norm of all gradients, and derive the check from it."""
    home = inverse.device
    parts: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    totals: list[torch.Tensor] = []
    tops: list[torch.Tensor] = []
    # A norm of order 0 or less may be finite though an element is not.
    amax = amax or order <= 0.0
    for device, dtype, grads in gathered.buckets:
        some, top = measure.norms(grads, order, amax=amax)
        parts[device, dtype] = some
        total = torch.linalg.vector_norm(torch.stack(some), order)
        if 0.0 < order < math.inf:
            total = _bounded(grads, order, total, top, may_read=may_read)
        totals.append(total.to(home, non_blocking=True))
        if top is not None:
            tops.append(top.to(home, non_blocking=True))
    norm = totals[0]
    if len(totals) > 1:
        norm = torch.linalg.vector_norm(torch.stack(totals), order)
    norm = norm.float()
    return Survey(
        _overflows(tops if order <= 0.0 else [norm], inverse, may_read=may_read),
        {AMAX: _maximum(tops).float()} if amax else {},
        norm=norm,
        parts=_in_order(parts, gathered),
    )


def _bounded(
    grads: list[torch.Tensor],
    order: float,
    total: torch.Tensor,
    top: torch.Tensor | None,
    *,
    may_read: bool,
) -> torch.Tensor:
    """Return a norm that is finite if all elements are, as long as it fits float32.

    A sum of powers may overflow over finite elements.  An upper bound then takes the
    norm's place: the gradients are clipped harder than necessary.
    """
    if may_read and math.isfinite(total.item()):
        return total
    most = measure.largest(grads) if top is None else top
    bound = bounded_norm(most, sum(grad.numel() for grad in grads), order)
    return torch.where(backend.nonfinite(total), bound, total)


def _in_order(
    parts: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]],
    gathered: Gathered,
) -> list[torch.Tensor]:
    """Return the norms of all buckets in the order of the parameters."""
    if len(parts) == 1:
        (only,) = parts.values()
        return only
    rest = {kind: iter(some) for kind, some in parts.items()}
    return [next(rest[grad.device, grad.dtype]) for grad in gathered.grads]


def _measure_largest(
    buckets: list[Bucket], inverse: torch.Tensor, *, may_read: bool
) -> Survey:
    """Measure the largest magnitude, and derive the check from it."""
    home = inverse.device
    sizes = [
        measure.largest(bucket.grads).to(home, non_blocking=True) for bucket in buckets
    ]
    found = _overflows(sizes, inverse, may_read=may_read)
    return Survey(found, {AMAX: _maximum(sizes).float()})


def _overflows(
    sizes: list[torch.Tensor], inverse: torch.Tensor, *, may_read: bool
) -> torch.Tensor:
    """Return 1 if a size is not finite, or would not be once unscaled.  float32 []."""
    if may_read:
        factor = max(1.0, inverse.item())
        fits = all(size.item() * factor <= FLOAT32_MAX for size in sizes)  # NaN: no
        return torch.zeros_like(inverse) if fits else torch.ones_like(inverse)
    # Each in its own dtype: a float64 gradient may exceed float32's range.
    flags = [
        backend.nonfinite(torch.maximum(size, size * inverse.to(size.dtype))).float()
        for size in sizes
    ]
    return _maximum(flags)


def _maximum(numbers: list[torch.Tensor]) -> torch.Tensor:
    return numbers[0] if len(numbers) == 1 else torch.stack(numbers).max()


def _check(buckets: list[Bucket], home: torch.device) -> Survey:
    """Only check, where nothing else is wanted."""
    flags = [_check_bucket(bucket).to(home, non_blocking=True) for bucket in buckets]
    return Survey(_maximum(flags), {})


def _check_bucket(bucket: Bucket) -> torch.Tensor:
    flag = torch.zeros((), dtype=torch.float32, device=bucket.device)
    count = sum(map(torch.Tensor.numel, bucket.grads))
    if bucket.dtype is torch.float32 and count > _LARGE * len(bucket.grads):
        total = torch.stack([grad.sum() for grad in bucket.grads]).sum()
        seen = backend.known(total)
        if seen is not None and math.isfinite(seen):
            return flag  # an inf or NaN would have made the sum one
    backend.check_and_multiply_(bucket.grads, flag, torch.ones_like(flag))
    return flag
