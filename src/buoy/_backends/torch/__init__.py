"""Tensor operations of the PyTorch front end, and the five functions of `Ops`.

The functions work eagerly and under torch.compile, without host reads unless they say
so.  Torch's amp kernel is used if it exists and passes `kernel_works`; the fallback has
bit-identical results.
"""

import math
from collections.abc import Sequence

import torch

from buoy._core.ops import PLAIN, Ops, Precision, Scalar, register_ops

__all__ = [
    "amax",
    "any_nonfinite",
    "check_and_multiply_",
    "check_and_multiply_plainly_",
    "in_host_memory",
    "kernel_works",
    "known",
    "lift",
    "local",
    "magnitude",
    "multiply_",
    "nonfinite",
    "norms",
    "ops",
    "read",
    "read_one",
    "reciprocal",
    "scalar",
    "self_test",
    "value_or_copy",
]

Grads = list[torch.Tensor]

_is_transformed = torch._C._functorch.is_functorch_wrapped_tensor
_DTYPES = {"float32": torch.float32, "float64": torch.float64}
_HALVES = (torch.float16, torch.bfloat16)
_WIDE = (torch.float32, torch.float64)


class _Torch:
    @staticmethod
    def where(condition: Scalar, if_true: Scalar, if_false: Scalar, /) -> Scalar:
        if not isinstance(condition, torch.Tensor):
            return if_true if condition else if_false
        if isinstance(if_true, float) and isinstance(if_false, float):
            if_true = _wide(if_true, condition.device)  # torch.where would use float32
        return torch.where(condition, if_true, if_false)

    @staticmethod
    def log2(x: Scalar, /) -> Scalar:
        return torch.log2(x) if isinstance(x, torch.Tensor) else PLAIN.log2(x)

    @staticmethod
    def exp2(x: Scalar, /) -> Scalar:
        return torch.pow(2.0, x) if isinstance(x, torch.Tensor) else PLAIN.exp2(x)

    @staticmethod
    def floor(x: Scalar, /) -> Scalar:
        return torch.floor(x) if isinstance(x, torch.Tensor) else PLAIN.floor(x)

    @staticmethod
    def cast(x: Scalar, precision: Precision, /) -> Scalar:
        if not isinstance(x, torch.Tensor):
            return PLAIN.cast(x, precision)
        return x.to(_DTYPES[precision])


def _wide(x: float, device: torch.device) -> torch.Tensor:
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return torch.full((), x, dtype=dtype, device=device)


_TORCH = _Torch()
register_ops(torch.Tensor, _TORCH)
register_ops(torch.nn.Parameter, _TORCH)


def ops() -> Ops:
    """Return the five functions for torch tensors."""
    return _TORCH


def lift(
    value: Scalar,
    precision: Precision = "float32",
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Turn a plain number into a 0-d tensor of the given precision.

    A tensor is moved to the device, and is not read.
    """
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, bool):
        return torch.tensor(value, dtype=torch.bool, device=device)
    if isinstance(value, int):
        return torch.tensor(value, dtype=torch.int32, device=device)
    return torch.tensor(value, dtype=_DTYPES[precision], device=device)


def reciprocal(scale: torch.Tensor) -> torch.Tensor:
    """Return 1 / scale, correctly rounded to float32.

    A CPU's float32 division is correctly rounded, and so is the float64 quotient
    rounded to float32, as torch computes it.  Other devices may approximate float32
    division, and MPS has no float64.
    """
    if scale.is_cpu or scale.is_mps:
        return scale.reciprocal()
    return scale.double().reciprocal().float()


def check_and_multiply_(
    grads: Grads, found: torch.Tensor, factor: torch.Tensor
) -> None:
    """Set `found` to 1 if any gradient is not finite, and multiply all by `factor`.

    All gradients are of one dtype and device.
    """
    if not torch.compiler.is_dynamo_compiling() and kernel_works(
        grads[0].device, grads[0].dtype
    ):
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, factor)
    else:
        check_and_multiply_plainly_(grads, found, factor)


def check_and_multiply_plainly_(
    grads: Grads, found: torch.Tensor, factor: torch.Tensor
) -> None:
    """Do the same as `check_and_multiply_`, without the amp kernel."""
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
    """Return whether any element of any gradient is inf or NaN.  bool []."""
    flags = [torch.isfinite(grad).all() for grad in grads]
    return torch.stack(flags).all().logical_not()


def _self_test(device: torch.device, dtype: torch.dtype) -> bool:
    quarter = torch.full((), 0.25, dtype=torch.float32, device=device)
    for bad in (None, math.inf, -math.inf, math.nan):
        start = [4.0, -2.0, 0.5, 1.0] if bad is None else [4.0, -2.0, 0.5, bad]
        vector = torch.tensor(start * 5, dtype=dtype, device=device)
        wanted = vector.float() * 0.25
        found = torch.zeros_like(quarter)
        torch._amp_foreach_non_finite_check_and_unscale_([vector], found, quarter)
        right = torch.equal(vector.float()[:3], wanted[:3])
        if not right or found.item() != (0.0 if bad is None else 1.0):
            return False
    return True


_PASSED: dict[tuple[torch.device, torch.dtype], bool] = {}


def kernel_works(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch's amp kernel passes a test, run once per device and dtype.

    On MPS that kernel once zeroed half-precision gradients silently (pytorch#184286).
    """
    passed = _PASSED.get((device, dtype))
    if passed is None:
        passed = _PASSED[device, dtype] = _try(device, dtype)
    return passed


def self_test(device: torch.device) -> None:
    """Test the kernel with every dtype of gradients, before it is needed."""
    for dtype in (*_WIDE, *_HALVES):
        kernel_works(device, dtype)


def _try(device: torch.device, dtype: torch.dtype) -> bool:
    if dtype not in _WIDE and dtype not in _HALVES:
        return True  # the kernel raises for other dtypes
    try:
        return _self_test(device, dtype)
    except (NotImplementedError, RuntimeError, AttributeError, TypeError):
        return False


def norms(grads: Grads, order: float) -> Grads:
    """Return each gradient's norm, in float32 or wider."""
    dtype = torch.float32 if grads[0].dtype in _HALVES else None
    if order == math.inf and (grads[0].is_cpu or not all(g.numel() for g in grads)):
        # On a CPU `_foreach_norm(inf)` is ten times slower than `aminmax`; on no device
        # does it accept empty tensors.
        return [_largest(grad) for grad in grads]
    taken: tuple[torch.Tensor, ...] = torch._foreach_norm(grads, order, dtype=dtype)
    return list(taken)


def _largest(grad: torch.Tensor) -> torch.Tensor:
    if grad.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=grad.device)
    low, high = torch.aminmax(grad)
    return torch.maximum(-low, high).to(torch.promote_types(grad.dtype, torch.float32))


def amax(grads: Grads) -> torch.Tensor:
    """Return the largest magnitude on this rank; inf and NaN propagate.  float32 []."""
    return torch.stack(norms([local(g) for g in grads], math.inf)).max().float()


def magnitude(tensor: torch.Tensor) -> torch.Tensor:
    """Return one tensor's largest magnitude, for any floating dtype and layout.

    As a test for finite elements this is many times faster than `isfinite`.
    """
    part = local(tensor.detach())
    if part.layout is not torch.strided:
        part = part._values() if part.is_sparse else part.values()
    if part.is_complex():
        part = torch.view_as_real(part)
    return _largest(part.float() if part.itemsize == 1 else part)  # FP8 has no aminmax


def nonfinite(x: torch.Tensor) -> torch.Tensor:
    """Return whether each element is inf or NaN; three times as fast as `isfinite`."""
    return (x - x) != 0


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor; a plain tensor is returned unchanged."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def in_host_memory(tensor: torch.Tensor) -> bool:
    """Return whether the host can read this tensor without waiting."""
    return (
        type(tensor) is torch.Tensor
        and tensor.is_cpu
        and not torch.compiler.is_dynamo_compiling()
        and not _is_transformed(tensor)
    )


def known(number: float | torch.Tensor) -> float | None:
    """Return a number's value if the host can read it without waiting, else None."""
    if not isinstance(number, torch.Tensor):
        return float(number)
    return number.item() if in_host_memory(number) else None


def value_or_copy(number: torch.Tensor) -> float | torch.Tensor | None:
    """Return a number's value if the host can read it without waiting, else a copy.

    None for tensors on "meta" and in transforms of `torch.func`.
    """
    if _is_transformed(number) or number.is_meta:
        return None
    if number.is_complex():
        number = number.detach().abs()
    return number.item() if in_host_memory(number) else number.detach().clone()


def scalar(value: float | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a number or tensor as a float32 [] on a device."""
    if isinstance(value, torch.Tensor):
        return value.reshape(()).float().to(device, non_blocking=True)
    return torch.full((), value, dtype=torch.float32, device=device)


def read(numbers: Sequence[float | torch.Tensor]) -> list[float]:
    """Read 0-d tensors in one transfer; those of the CPU without waiting."""
    tensors = [one for one in numbers if isinstance(one, torch.Tensor)]
    if not tensors:
        return [float(one) for one in numbers]
    home = tensors[0].device
    packed = torch.stack([t.detach().reshape(()).float().to(home) for t in tensors])
    found = iter(packed.tolist())
    return [next(found) if isinstance(n, torch.Tensor) else float(n) for n in numbers]


def read_one(number: float | torch.Tensor) -> float:
    """Read a number, and wait for it if it is on a device."""
    return float(number.item()) if isinstance(number, torch.Tensor) else number
