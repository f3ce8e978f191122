"""Find and replace the float32 tensors in an operator's arguments and results."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

__all__ = ["floats", "mapped"]


def floats(values: Iterable[object]) -> Iterator[torch.Tensor]:
    """Yield the float32 tensors among values, and in lists of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.dtype is torch.float32:
                yield value
        elif isinstance(value, (list, tuple)):
            yield from floats(value)


def mapped(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Replace the float32 tensors in a value.

    Example:
        >>> mapped(lambda x: x + 1, [torch.zeros(2), 7, None])
        [tensor([1., 1.]), 7, None]
    """
    if isinstance(value, torch.Tensor):
        return function(value) if value.dtype is torch.float32 else value
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(function, part) for part in value)
    return value
