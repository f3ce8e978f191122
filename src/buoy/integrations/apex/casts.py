"""Which types a model, its inputs and outputs, and single functions compute in."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import reduce, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map_only

from buoy._backends.torch.rounding import HALVES
from buoy.integrations.apex.levels import Level

__all__ = [
    "cast_model",
    "disable_casts",
    "float_function",
    "half_function",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
]

P = ParamSpec("P")
T = TypeVar("T")


# -- models ----------------------------------------------------------------------------


def cast_model(
    model: torch.nn.Module, level: Level, outputs: torch.dtype | None
) -> None:
    """Cast a model in place, and let its forward pass cast what it is given.

    Outputs are cast to FP32 by default, so that losses are computed in FP32.
    """
    dtype = level.cast_model_type
    mixed = level.patch_torch_functions
    if dtype is not None:
        _cast_tensors(model, dtype, keep_norms=bool(level.keep_batchnorm_fp32))
    if dtype in HALVES:
        model.register_state_dict_post_hook(_in_fp32)  # type: ignore[no-untyped-call]
    elif not mixed and (dtype is None or outputs is None):
        return
    forward = model.forward
    device = next((param.device.type for param in model.parameters()), "cpu")

    @wraps(forward)
    def cast(*args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            args, kwargs = _cast((args, kwargs), dtype)
        with torch.autocast(device, torch.float16) if mixed else nullcontext():
            result = forward(*args, **kwargs)
        return _cast(result, outputs or torch.float32)

    # On the model alone: what it calls inside sees the types that it passes on.
    model.__dict__["forward"] = cast


def _cast_tensors(
    model: torch.nn.Module, dtype: torch.dtype, *, keep_norms: bool
) -> None:
    for module in model.modules():
        if keep_norms and isinstance(module, _BatchNorm) and module.affine:
            continue
        for tensor in (
            *module.parameters(recurse=False),
            *module.buffers(recurse=False),
        ):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    """Cast the tensors of floating-point numbers in nested values."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return tree_map_only(torch.Tensor, cast, tree)


def _in_fp32(
    module: torch.nn.Module, saved: dict[str, Any], prefix: str, metadata: object
) -> None:
    """Save FP32, so that a checkpoint fits any level."""
    del module, metadata
    for name, value in saved.items():
        if name.startswith(prefix) and torch.is_tensor(value) and value.dtype in HALVES:
            saved[name] = value.float()


# -- functions -------------------------------------------------------------------------


def float_function(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function run in FP32.

    Example:
        >>> @float_function
        ... def total(x):
        ...     return x.sum()
        >>> total(torch.ones(2).half()).dtype
        torch.float32
    """
    return _in(function, torch.float32)


def half_function(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function run in FP16."""
    return _in(function, torch.float16)


def promote_function(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function run in the widest type of its arguments."""
    return _in(function, None)


def register_float_function(module: object, name: str) -> None:
    """Replace a module's function by one that runs in FP32."""
    setattr(module, name, float_function(getattr(module, name)))


def register_half_function(module: object, name: str) -> None:
    """Replace a module's function by one that runs in FP16."""
    setattr(module, name, half_function(getattr(module, name)))


def register_promote_function(module: object, name: str) -> None:
    """Replace a module's function by one that runs in its arguments' widest type."""
    setattr(module, name, promote_function(getattr(module, name)))


@contextmanager
def disable_casts() -> Iterator[None]:
    """Run without O1's casts."""
    with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
        yield


def _in(function: Callable[P, T], dtype: torch.dtype | None) -> Callable[P, T]:
    """Cast a function's arguments; to the widest of their types if none is given."""

    @wraps(function)
    def cast(*args: P.args, **kwargs: P.kwargs) -> T:
        values = tree_leaves((args, kwargs))
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        floats = [tensor for tensor in tensors if tensor.is_floating_point()]
        if not floats:
            return function(*args, **kwargs)
        widest = reduce(torch.promote_types, [tensor.dtype for tensor in floats])
        args, kwargs = _cast((args, kwargs), dtype or widest)
        with torch.autocast(floats[0].device.type, enabled=False):
            return function(*args, **kwargs)

    return cast
