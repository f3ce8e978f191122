"""What the PyTorch front end computes on tensors, and the rule's five functions.

Everything here is eager-safe, traceable and free of host reads.  The amp kernel of
torch is used where it exists and passes `kernel_works`; the plain operations beside it
give the same bits without it and without float64.
"""

import ctypes
import math
from collections.abc import Sequence

import torch
from torch._C import _functorch as functorch

from buoy._core.ops import PLAIN, Ops, Precision, Scalar, know

__all__ = [
    "NoGrad",
    "Window",
    "amax",
    "any_nonfinite",
    "check_and_multiply_",
    "check_and_multiply_plainly_",
    "exact_norm",
    "in_host_memory",
    "kernel_works",
    "lift",
    "local",
    "magnitude",
    "multiply_",
    "nonfinite",
    "norms",
    "noted",
    "number",
    "ops",
    "peek",
    "read",
    "reciprocal",
    "self_test",
    "small_share",
    "sums",
    "transforming",
    "unwrapped",
    "whole",
    "window",
]

Grads = list[torch.Tensor]

_DTYPES = {"float32": torch.float32, "float64": torch.float64}
_HALVES = (torch.float16, torch.bfloat16)
_WIDE = (torch.float32, torch.float64)
_Float = ctypes.c_float


class _Torch:
    @staticmethod
    def where(condition: Scalar, if_true: Scalar, if_false: Scalar, /) -> Scalar:
        if not isinstance(condition, torch.Tensor):
            return if_true if condition else if_false
        if isinstance(if_true, float) and isinstance(if_false, float):
            if_true = _wide(if_true, condition.device)  # torch.where would take float32
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
know(torch.Tensor, _TORCH)
know(torch.nn.Parameter, _TORCH)


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
        return torch.tensor(value, dtype=torch.bool, device=device)
    if isinstance(value, int):
        return torch.tensor(value, dtype=torch.int32, device=device)
    return torch.tensor(value, dtype=_DTYPES[precision], device=device)


def reciprocal(scale: torch.Tensor) -> torch.Tensor:
    """Divide 1 by the scale, rounded once.

    A CPU's float32 division is exact to the last bit (and float64 has enough digits
    that rounding twice changes nothing, so torch's own detour gives the same); other
    devices may approximate it, and MPS has no float64.
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
    if not torch.compiler.is_compiling() and kernel_works(
        grads[0].device, grads[0].dtype
    ):
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


class NoGrad:
    """Do what `torch.no_grad()` does around a few lines, in a third of its time."""

    __slots__ = ("_recording",)

    def __enter__(self) -> None:
        self._recording = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # noqa: SLF001

    def __exit__(self, *_: object) -> None:
        torch._C._set_grad_enabled(self._recording)  # noqa: SLF001


def any_nonfinite(grads: Grads) -> torch.Tensor:
    """Tell whether any element of any gradient is inf or NaN.  bool []."""
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
    """Send one known vector through torch's amp kernel, once per device and dtype.

    On MPS that kernel once zeroed half-precision gradients silently (pytorch#184286).
    """
    passed = _PASSED.get((device, dtype))
    if passed is None:
        passed = _PASSED[device, dtype] = _try(device, dtype)
    return passed


def self_test(device: torch.device) -> None:
    """Try the kernel with every dtype that gradients come in, before it is needed."""
    for dtype in (*_WIDE, *_HALVES):
        kernel_works(device, dtype)


def _try(device: torch.device, dtype: torch.dtype) -> bool:
    if dtype not in _WIDE and dtype not in _HALVES:
        return True  # let the kernel say itself what it does not take
    try:
        return _self_test(device, dtype)
    except (NotImplementedError, RuntimeError, AttributeError, TypeError):
        return False


def norms(grads: Grads, order: float) -> Grads:
    """Take each gradient's norm, in float32 or wider."""
    dtype = torch.float32 if grads[0].dtype in _HALVES else None
    if order == math.inf and (grads[0].is_cpu or not all(g.numel() for g in grads)):
        # On a CPU `_foreach_norm(inf)` is ten times slower than `aminmax`, and nowhere
        # does it take tensors without elements.
        return [_largest(grad) for grad in grads]
    taken: tuple[torch.Tensor, ...] = torch._foreach_norm(grads, order, dtype=dtype)  # noqa: SLF001
    return list(taken)


def _largest(grad: torch.Tensor) -> torch.Tensor:
    if grad.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=grad.device)
    low, high = torch.aminmax(grad)
    return torch.maximum(-low, high).to(torch.promote_types(grad.dtype, torch.float32))


def amax(grads: Grads) -> torch.Tensor:
    """Find the largest magnitude on this rank; inf and NaN win.  float32 []."""
    return torch.stack(norms([local(g) for g in grads], math.inf)).max().float()


def magnitude(tensor: torch.Tensor) -> torch.Tensor:
    """Find one tensor's largest magnitude, of any floating dtype and any layout.

    To see whether all elements are finite this is many times quicker than `isfinite`.
    """
    part = local(tensor.detach())
    if part.layout is not torch.strided:
        part = part._values() if part.is_sparse else part.values()  # noqa: SLF001
    if part.is_complex():
        part = torch.view_as_real(part)
    return _largest(part.float() if part.itemsize == 1 else part)  # FP8 has no aminmax


def nonfinite(x: torch.Tensor) -> torch.Tensor:
    """Tell whether each element is inf or NaN; three times quicker than `isfinite`."""
    return (x - x) != 0


def whole(number: torch.Tensor) -> torch.Tensor:
    """Reduce a number over the ranks that share it (DTensor); a plain one stays."""
    reduced: torch.Tensor = (
        number.full_tensor() if hasattr(number, "full_tensor") else number
    )
    return reduced


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Take this rank's part of a DTensor; a plain tensor is its own part."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def peek(number: torch.Tensor) -> float:
    """Look at a float32 of the CPU where it lies: the host's memory is no device.

    Nothing is copied and nothing waits.  On any other device this would be wrong, and
    under a compiler there is no memory yet; callers ask `in_host_memory` first.
    """
    return _Float.from_address(number.data_ptr()).value


class Window:
    """A lasting look at a float32 of the CPU: `number.value` is what lies there now."""

    __slots__ = ("_storage", "number")

    def __init__(self, number: torch.Tensor) -> None:
        self._storage = number.untyped_storage()  # lives as long as it is looked at
        self.number = _Float.from_address(number.data_ptr())


def window(number: torch.Tensor) -> Window | None:
    """Open one, where the host's memory is the device."""
    return Window(number) if in_host_memory(number) else None


def in_host_memory(tensor: torch.Tensor) -> bool:
    """Say whether `peek` may look at it."""
    return (
        type(tensor) is torch.Tensor
        and tensor.is_cpu
        and tensor.dtype is torch.float32
        and not torch.compiler.is_compiling()
    )


def noted(number: torch.Tensor) -> float | torch.Tensor:
    """Keep a number as it is now: its value if the host can see it, else a copy."""
    return peek(number) if in_host_memory(number) else number.detach().clone()


def number(value: float | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Give what was noted as a float32 [] on a device."""
    if isinstance(value, torch.Tensor):
        return value.reshape(()).float().to(device, non_blocking=True)
    return torch.full((), value, dtype=torch.float32, device=device)


def transforming() -> bool:
    """Say whether this runs inside `torch.func.grad`, `vmap` or the like."""
    return functorch.peek_interpreter_stack() is not None


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Take a tensor out of such a transformation, to outlive it."""
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def read(numbers: Sequence[float | torch.Tensor]) -> list[float]:
    """Read 0-d tensors, all at once; of the CPU's without asking anybody."""
    tensors = [one for one in numbers if isinstance(one, torch.Tensor)]
    if not tensors:
        return [float(one) for one in numbers]
    home = tensors[0].device
    packed = torch.stack([t.detach().reshape(()).float().to(home) for t in tensors])
    values = iter(_listed(packed))
    return [next(values) if isinstance(n, torch.Tensor) else float(n) for n in numbers]


def _listed(packed: torch.Tensor) -> list[float]:
    if in_host_memory(packed):
        return (_Float * packed.numel()).from_address(packed.data_ptr())[:]
    values: list[float] = packed.tolist()
    return values


def values(vector: torch.Tensor) -> list[float]:
    """Read a vector of adjacent numbers; of the CPU's without asking anybody."""
    if not in_host_memory(vector):
        found: list[float] = vector.tolist()
        return found
    return (_Float * vector.numel()).from_address(vector.data_ptr())[:]


def exact_norm(grads: Grads, order: float) -> torch.Tensor:
    """Take the norm of a CPU's gradients in float64, whose squares do not overflow."""
    parts = [torch.linalg.vector_norm(g, order, dtype=torch.float64) for g in grads]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(parts), order)
    return total


def sums(grads: Grads) -> Grads:
    """Sum each gradient up: the cheapest number that no inf or NaN leaves finite."""
    return [grad.sum() for grad in grads]


def small_share(grads: Grads, below: float = 2.0**-20) -> torch.Tensor:
    """Tell which share of the nonzero gradients is below `below`.  float32 []."""
    total = sum(grad.numel() for grad in grads)
    below_it = torch.stack([torch.count_nonzero(g.abs() < below) for g in grads]).sum()
    nonzero = torch.stack([torch.count_nonzero(grad) for grad in grads]).sum()
    some = below_it - (total - nonzero)  # zeros are below it, too
    return torch.div(some.float(), nonzero.clamp(min=1).float())
