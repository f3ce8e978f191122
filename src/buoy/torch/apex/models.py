"""Cast a model to a level's types, and what goes into and comes out of it."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

from buoy.torch.apex.levels import Level
from buoy.torch.rounding import HALVES

__all__ = ["cast_model"]


def cast_model(
    model: torch.nn.Module, level: Level, outputs: torch.dtype | None
) -> None:
    """Cast a model in place, and let its forward pass cast what it is given.

    Outputs come back in FP32 unless told otherwise, so that losses are computed in it.
    """
    back = outputs or torch.float32
    if level.patch_torch_functions:
        device = _device_of(model)
        _around(model, lambda forward: _autocast(forward, device, back))
        return
    dtype = level.cast_model_type
    if dtype is None:
        return
    _cast_tensors(model, dtype, keep_norms=bool(level.keep_batchnorm_fp32))
    if dtype in HALVES:
        _around(model, lambda forward: _casting(forward, dtype, back))
        model.register_state_dict_post_hook(_in_fp32)  # type: ignore[no-untyped-call]
    elif outputs is not None:
        _around(model, lambda forward: _casting(forward, dtype, back))


def _device_of(model: torch.nn.Module) -> str:
    for param in model.parameters():
        return param.device.type
    return "cpu"


def _cast_tensors(
    model: torch.nn.Module, dtype: torch.dtype, *, keep_norms: bool
) -> None:
    for module in model.modules():
        if keep_norms and isinstance(module, _BatchNorm) and module.affine:
            continue
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)


def _around(
    model: torch.nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    # On the model alone: what it calls inside sees the types that it passes on.
    model.__dict__["forward"] = wrap(model.forward)


def _autocast(
    forward: Callable[..., Any], device: str, back: torch.dtype
) -> Callable[..., Any]:
    @wraps(forward)
    def mixed(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, torch.float16):
            return _cast(forward(*args, **kwargs), back)

    return mixed


def _casting(
    forward: Callable[..., Any], dtype: torch.dtype, back: torch.dtype
) -> Callable[..., Any]:
    @wraps(forward)
    def cast(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _cast((args, kwargs), dtype)
        return _cast(forward(*args, **kwargs), back)

    return cast


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(
        torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree
    )


def _in_fp32(
    module: torch.nn.Module, saved: dict[str, Any], prefix: str, metadata: Any
) -> None:
    """Save FP32, so that a checkpoint fits any level."""
    del module, metadata
    for name, value in saved.items():
        if name.startswith(prefix) and torch.is_tensor(value) and value.dtype in HALVES:
            saved[name] = value.float()
