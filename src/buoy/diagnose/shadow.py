"""Run a step, or one module of it, in FP32 although it says FP16."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from buoy.torch import keep_fp32

__all__ = ["in_full_precision", "with_one_in_fp32"]

_HALVES = (torch.float16, torch.bfloat16)


@contextmanager
def in_full_precision(model: torch.nn.Module) -> Iterator[None]:
    """Let autocast do nothing, and parameters, buffers and inputs be FP32."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(_autocast_off())
        stack.enter_context(_widened([*model.parameters(), *model.buffers()]))
        hook = model.register_forward_pre_hook(_widen_inputs, with_kwargs=True)
        stack.callback(hook.remove)
        yield


@contextmanager
def with_one_in_fp32(model: torch.nn.Module, name: str) -> Iterator[None]:
    """Let one module run in FP32, as `buoy.torch.keep_fp32` does."""
    module = model.get_submodule(name)
    # Widened here, so that the parameters get their own memory back in the end.
    with _widened([*module.parameters(), *module.buffers()]), keep_fp32(model, name):
        yield


@contextmanager
def _autocast_off() -> Iterator[None]:
    """Let every autocast of the model's own do nothing, too."""
    kind: Any = torch.autocast
    original = kind.__enter__

    def enter(self: Any) -> Any:
        enabled = self._enabled
        self._enabled = False
        try:
            return original(self)
        finally:
            self._enabled = enabled

    kind.__enter__ = enter
    try:
        yield
    finally:
        kind.__enter__ = original


@contextmanager
def _widened(tensors: list[torch.Tensor]) -> Iterator[None]:
    halves = [(t, t.data) for t in tensors if t.dtype in _HALVES]
    try:
        for tensor, data in halves:
            tensor.data = data.float()
        yield
    finally:
        for tensor, data in halves:
            tensor.data = data


def _widen_inputs(
    module: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> Any:
    del module
    return pytree.tree_map_only(torch.Tensor, _widen, (args, kwargs))


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _HALVES else tensor
