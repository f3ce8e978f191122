"""What the PyTorch front end computes on tensors, and the rule's five functions.

Everything here is eager-safe, traceable and free of host reads.  The amp kernel of
torch is used where it exists and passes `kernel_works`; the plain operations beside it
give the same bits without it and without float64.
"""

import math
from functools import lru_cache

import torch

from buoy._core.ops import Ops, Precision, Scalar

__all__ = [
    "amax",
    "any_nonfinite",
    "check_and_multiply_",
    "check_and_multiply_plainly_",
    "kernel_works",
    "lift",
    "look_again",
    "multiply_",
    "norms",
    "ops",
    "reciprocal",
    "small_share",
]

Grads = list[torch.Tensor]

_DTYPES = {"float32": torch.float32, "float64": torch.float64}
_HALVES = (torch.float16, torch.bfloat16)
_WIDE = (torch.float32, torch.float64)


class _Torch:
    @staticmethod
    def where(condition: Scalar, if_true: Scalar, if_false: Scalar, /) -> Scalar:
        if not isinstance(condition, torch.Tensor):
            return if_true if condition else if_false
        return torch.where(condition, if_true, if_false)

    @staticmethod
    def log2(x: Scalar, /) -> Scalar:
        return torch.log2(x)

    @staticmethod
    def exp2(x: Scalar, /) -> Scalar:
        return torch.pow(2.0, x)

    @staticmethod
    def floor(x: Scalar, /) -> Scalar:
        return torch.floor(x)

    @staticmethod
    def cast(x: Scalar, precision: Precision, /) -> Scalar:
        if not isinstance(x, torch.Tensor):
            return torch.tensor(x, dtype=_DTYPES[precision])
        return x.to(_DTYPES[precision])


_TORCH = _Torch()


def ops() -> Ops:
    """Give the five functions."""
    return _TORCH


def lift(
    value: Scalar,
    precision: Precision = "float32",
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Turn a plain number into a 0-d tensor of the width that states use."""
    if isinstance(value, bool):
        return torch.tensor(value, device=device)
    if isinstance(value, int):
        return torch.tensor(value, dtype=torch.int32, device=device)
    return torch.tensor(value, dtype=_DTYPES[precision], device=device)


def reciprocal(scale: torch.Tensor) -> torch.Tensor:
    """Divide 1 by the scale, rounded once.

    A CPU's float32 division is exact to the last bit (and float64 has enough digits
    that rounding twice changes nothing, so torch's own detour gives the same); other
    devices may approximate it, and MPS has no float64.
    """
    if scale.device.type in ("cpu", "mps"):
        return scale.reciprocal()
    return scale.double().reciprocal().float()


def check_and_multiply_(
    grads: Grads, found: torch.Tensor, factor: torch.Tensor
) -> None:
    """Set `found` to 1 if any gradient is not finite, and multiply all by `factor`.

    All gradients are of one dtype and device.
    """
    if kernel_works(grads[0].device, grads[0].dtype):
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, factor)
    else:
        check_and_multiply_plainly_(grads, found, factor)


def check_and_multiply_plainly_(
    grads: Grads, found: torch.Tensor, factor: torch.Tensor
) -> None:
    """Do the same without the amp kernel."""
    bad = any_nonfinite(grads).to(found.dtype).reshape(found.shape)
    found.copy_(torch.maximum(found, bad))
    if grads[0].dtype in _WIDE:
        torch._foreach_mul_(grads, factor.reshape(()))
        return
    for grad in grads:
        # In half precision the factor itself would be rounded, often to 0.
        grad.copy_(grad.float() * factor.reshape(()))


def multiply_(grads: Grads, factor: torch.Tensor) -> None:
    """Multiply gradients of one dtype and device in place."""
    if grads[0].dtype in _WIDE:
        torch._foreach_mul_(grads, factor)
    else:
        check_and_multiply_(grads, torch.zeros_like(factor), factor)


def any_nonfinite(grads: Grads) -> torch.Tensor:
    """Tell whether any element of any gradient is inf or NaN.  bool []."""
    flags = [torch.isfinite(grad).all() for grad in grads]
    return torch.stack(flags).all().logical_not()


@lru_cache(maxsize=64)
def _tested(device: torch.device, dtype: torch.dtype) -> bool:
    try:
        return _self_test(device, dtype)
    except (NotImplementedError, RuntimeError, AttributeError, TypeError):
        return False


def _self_test(device: torch.device, dtype: torch.dtype) -> bool:
    quarter = torch.full((), 0.25, device=device)
    for bad in (None, math.inf, -math.inf, math.nan):
        start = [4.0, -2.0, 0.5, 1.0] if bad is None else [4.0, -2.0, 0.5, bad]
        vector = torch.tensor(start * 5, device=device).to(dtype)
        wanted = vector.float() * 0.25
        found = torch.zeros((), device=device)
        torch._amp_foreach_non_finite_check_and_unscale_([vector], found, quarter)
        right = torch.equal(vector.float()[:3], wanted[:3])
        if not right or found.item() != (0.0 if bad is None else 1.0):
            return False
    return True


def kernel_works(device: torch.device, dtype: torch.dtype) -> bool:
    """Send one known vector through torch's amp kernel, once per device and dtype.

    On MPS that kernel once zeroed half-precision gradients silently (pytorch#184286).
    """
    if dtype not in _WIDE and dtype not in _HALVES:
        return True  # let the kernel say itself what it does not take
    if torch.compiler.is_compiling():
        return False
    return _tested(device, dtype)


def norms(grads: Grads, order: float) -> Grads:
    """Take each gradient's norm, in float32 or wider."""
    dtype = torch.float32 if grads[0].dtype in _HALVES else None
    if order == math.inf and grads[0].device.type == "cpu":
        # `_foreach_norm(inf)` is ten times slower than `aminmax` on a CPU.
        return [_largest(grad) for grad in grads]
    return list(torch._foreach_norm(grads, order, dtype=dtype))


def _largest(grad: torch.Tensor) -> torch.Tensor:
    if grad.numel() == 0:
        return torch.zeros((), device=grad.device)
    low, high = torch.aminmax(grad)
    return torch.maximum(-low, high).to(torch.promote_types(grad.dtype, torch.float32))


def amax(grads: Grads) -> torch.Tensor:
    """Find the largest magnitude; inf and NaN win.  float32 []."""
    return torch.stack(norms(grads, math.inf)).max().float()


def look_again(grads: Grads, order: float, suspicious: torch.Tensor) -> torch.Tensor:
    """Where suspicious, take the norm of a CPU's gradients in float64; else 0.

    A sum of squares can overflow although every element is finite.  The flag decides
    how many rows are copied, one or none, so that an unsuspicious look costs nothing
    and nobody asks the flag for its value.
    """
    rows = torch.repeat_interleave(suspicious.reshape(1).long())
    parts = [
        torch.linalg.vector_norm(row_of(grad, rows), order, dtype=torch.float64)
        for grad in grads
    ]
    return torch.linalg.vector_norm(torch.stack(parts), order)


def row_of(grad: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Copy a gradient if `rows` is [0], nothing if it is empty."""
    return grad.reshape(1, -1).index_select(0, rows)


def small_share(grads: Grads, below: float = 2.0**-20) -> torch.Tensor:
    """Tell which share of the nonzero gradients is smaller than `below`.  float32 []."""
    small = torch.stack([((g != 0) & (g.abs() < below)).sum() for g in grads]).sum()
    nonzero = torch.stack([(g != 0).sum() for g in grads]).sum()
    return small.float() / nonzero.clamp(min=1).float()
