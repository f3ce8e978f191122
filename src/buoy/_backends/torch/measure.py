"""Measurements of gradients: the largest magnitude, the norms, and for policies.

What the check does not need is measured on a sample of the elements.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from buoy._backends import torch as backend
from buoy._core.formats import FLOAT32_MAX
from buoy._core.ops import single
from buoy._core.step import (
    BLOCK,
    CLIP_EPSILON,
    SMALL,
    bounded_norm,
    clip_factor,
    sample_stride,
)

__all__ = [
    "MEASURE",
    "Grads",
    "biggest",
    "clip_factor_of",
    "norms",
    "overflows",
    "sampled",
    "settled",
    "small_share",
]

Grads = list[torch.Tensor]
_EPSILON = single(CLIP_EPSILON)


def biggest(grads: Grads) -> torch.Tensor:
    """Return the largest magnitude, in float32 or wider; inf and NaN propagate."""
    if grads[0].is_cpu:
        return _farthest([torch.aminmax(grad) for grad in grads if grad.numel()])
    return torch.stack(backend.norms(grads, math.inf)).max()


def _farthest(ends: list[Any]) -> torch.Tensor:
    """Return the largest magnitude, from each gradient's two ends on a CPU."""
    if not ends:
        return torch.zeros((), dtype=torch.float32, device="cpu")
    top = torch.stack([end for pair in ends for end in pair]).abs_().max()
    return top.to(torch.promote_types(top.dtype, torch.float32))


def norms(
    grads: Grads, order: float, *, amax: bool
) -> tuple[Grads, torch.Tensor | None]:
    """Return each gradient's norm, and with `amax` the largest magnitude of all.

    On a CPU both of one gradient are taken before the next: the second read is from
    the cache, and costs half as much.
    """
    if not amax or order == math.inf or not grads[0].is_cpu:
        parts = backend.norms(grads, order)
        if not amax:
            return parts, None
        return parts, torch.stack(parts).max() if order == math.inf else biggest(grads)
    dtype = torch.float32 if grads[0].itemsize < 4 else None
    parts, ends = [], []
    for grad in grads:
        parts.append(torch.linalg.vector_norm(grad, order, dtype=dtype))
        if grad.numel():
            ends.append(torch.aminmax(grad))
    return parts, _farthest(ends)


def settled(
    grads: Grads, order: float, total: torch.Tensor, top: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the exact total, and a number that is finite iff all elements are.

    A finite total proves that every element is finite.  A non-finite total may come
    from an overflow in the sum of powers: then the largest element, `top`, decides.
    """
    if order == math.inf:
        return total, total
    seen = backend.host_value(total)
    if seen is not None and math.isfinite(seen) and order > 0.0:
        return total, total
    most = biggest(grads) if top is None else top
    if order <= 0.0:  # such a norm may be finite though an element is not
        return total, most
    if seen is not None:
        return backend.exact_norm(grads, order), most
    # If only the sum overflows, use an upper bound of the norm: the step is clipped
    # harder than necessary, but not skipped.  In float64, as it may fit once unscaled.
    wide = most if most.is_mps else most.double()
    bound = bounded_norm(wide, sum(grad.numel() for grad in grads), order)
    return torch.where(backend.nonfinite(total), bound, total), most


def clip_factor_of(norm: torch.Tensor, max_norm: float | torch.Tensor) -> torch.Tensor:
    """Return `clip_factor` as a tensor.

    A norm in host memory is worth no kernels: the same operations on plain numbers,
    each rounded to float32, have the same result in a fifth of the time.
    """
    if isinstance(max_norm, torch.Tensor) or (size := backend.host_value(norm)) is None:
        factor: torch.Tensor = clip_factor(norm, max_norm, backend.ops())
        return factor
    # Torch divides a number by a tensor as number x reciprocal.
    ratio = single(single(max_norm) * single(1.0 / single(size + _EPSILON)))
    return torch.full_like(norm, min(1.0, ratio))  # 1 if it is NaN


def overflows(sizes: list[torch.Tensor], inverse: torch.Tensor) -> torch.Tensor:
    """Return whether a size is not finite, or would not be once unscaled.  float32 [].

    Each size in its own dtype: a float64 gradient may exceed float32's range.  One in
    host memory is worth no kernels.
    """
    seen = backend.host_value(sizes[0]) if len(sizes) == 1 and inverse.is_cpu else None
    if seen is not None:
        unscaled = seen * backend.read_host_memory(inverse)
        fits = seen <= FLOAT32_MAX and unscaled <= FLOAT32_MAX  # NaN does not
        return torch.zeros_like(inverse) if fits else torch.ones_like(inverse)
    bad = [
        backend.nonfinite(torch.maximum(size, size * inverse.to(size.dtype)))
        for size in sizes
    ]
    return (bad[0] if len(bad) == 1 else torch.stack(bad).any()).float()


def sampled(grad: torch.Tensor, stride: int) -> list[torch.Tensor]:
    """Return views of the elements that are looked at: a list of them, or of blocks.

    `sample_stride` says which they are.
    """
    flat = grad.reshape(-1)
    if stride == 1:
        return [flat]
    count, period = flat.numel(), BLOCK * stride
    rest = count % period
    found = [flat[count - rest :]] if rest < BLOCK else []
    if count >= BLOCK:
        found.append(flat.unfold(0, BLOCK, period))
    return found


def small_share(
    groups: Sequence[Sequence[torch.Tensor]],
    home: torch.device,
    limit: float | torch.Tensor = SMALL,
) -> torch.Tensor:
    """Return the share of the nonzero gradients below `limit`; NaN if all are 0.

    The gradients of a group are of one device and dtype.  The sample is small, so it
    is copied, and counted at once; in place, as new memory costs more than the count.
    """
    stride = sample_stride(sum(grad.numel() for group in groups for grad in group))
    small, nonzero = [], []
    for group in groups:
        views = [view for grad in group for view in sampled(grad, stride)]
        for dim in (1, 2):
            alike = [view for view in views if view.dim() == dim]
            if not alike:
                continue
            sizes = torch.cat(alike).abs_()
            there = torch.count_nonzero(sizes)
            below = torch.count_nonzero(sizes.lt_(limit))
            zeros = sizes.numel() - there  # `below` includes them
            small.append((below - zeros).to(home, non_blocking=True))
            nonzero.append(there.to(home, non_blocking=True))
    return torch.stack(small).sum().float() / torch.stack(nonzero).sum().float()


def _underflow(buckets: Iterable[Any], home: torch.device) -> torch.Tensor:
    return small_share([bucket.grads for bucket in buckets], home)


# Besides `amax_log2`, which comes with the check: functions from buckets of (device,
# dtype, gradients) to a float32 [] on a device.
MEASURE: dict[str, Callable[[Sequence[Any], torch.device], torch.Tensor]] = {
    "underflow": _underflow,
}
