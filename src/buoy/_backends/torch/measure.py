"""Measurements of gradients: the largest magnitude, norms, and what policies want.

What the check does not need is measured on a sample of the elements.
"""

import math
from collections.abc import Callable, Sequence

import torch

from buoy._backends import torch as backend
from buoy._backends.torch.gradients import Gathered
from buoy._core.step import BLOCK, SMALL, sample_stride

__all__ = ["MEASURE", "largest", "norms", "sampled", "small_share"]

Grads = list[torch.Tensor]


def largest(grads: Grads) -> torch.Tensor:
    """Return the largest magnitude, in float32 or wider; inf and NaN propagate."""
    if grads[0].is_cpu:
        return _farthest([torch.aminmax(grad) for grad in grads if grad.numel()])
    return torch.stack(backend.norms(grads, math.inf)).max()


def _farthest(ends: Sequence[tuple[torch.Tensor, ...]]) -> torch.Tensor:
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
    if not amax:
        return backend.norms(grads, order), None
    if order == math.inf:
        parts = backend.norms(grads, order)
        return parts, torch.stack(parts).max()
    if not grads[0].is_cpu:
        return backend.norms(grads, order), largest(grads)
    dtype = torch.float32 if grads[0].itemsize < 4 else None
    parts = []
    ends: list[tuple[torch.Tensor, ...]] = []
    for grad in grads:
        parts.append(torch.linalg.vector_norm(grad, order, dtype=dtype))
        if grad.numel():
            ends.append(torch.aminmax(grad))
    return parts, _farthest(ends)


def sampled(grad: torch.Tensor, stride: int) -> list[torch.Tensor]:
    """Return views of the elements that are looked at: a list of them, or of blocks.

    `sample_stride` says which they are.
    """
    flat = grad.reshape(-1)
    if stride == 1:
        return [flat]
    count = flat.numel()
    period = BLOCK * stride
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
    small = []
    nonzero = []
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


def _underflow(gathered: Gathered, home: torch.device) -> torch.Tensor:
    """Measure the share of gradients that are small enough to be lost in FP16."""
    return small_share([bucket.grads for bucket in gathered.buckets], home)


# By the names in `Policy.wants`: functions from an optimizer's gradients, which are
# still scaled, to a float32 [] on a device.  "amax_log2" is not here: it comes with the
# check of the gradients, at no cost (`inspection.inspect`).
MEASURE: dict[str, Callable[[Gathered, torch.device], torch.Tensor]] = {
    "underflow": _underflow,
}
