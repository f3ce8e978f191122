"""Functions that are to run in a given precision, whatever surrounds them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

__all__ = [
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


def float_function(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function run in FP32.

    Example:
        >>> @float_function
        ... def total(x):
        ...     return x.sum()
        >>> total(torch.ones(2).half()).dtype
        torch.float32
    """
    return _in(function, lambda _: torch.float32)


def half_function(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function run in FP16."""
    return _in(function, lambda _: torch.float16)


def promote_function(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function run in the widest type of its arguments."""
    return _in(function, _widest)


def register_float_function(module: Any, name: str) -> None:
    """Replace a module's function by one that runs in FP32."""
    setattr(module, name, float_function(getattr(module, name)))


def register_half_function(module: Any, name: str) -> None:
    """Replace a module's function by one that runs in FP16."""
    setattr(module, name, half_function(getattr(module, name)))


def register_promote_function(module: Any, name: str) -> None:
    """Replace a module's function by one that runs in its arguments' widest type."""
    setattr(module, name, promote_function(getattr(module, name)))


@contextmanager
def disable_casts() -> Iterator[None]:
    """Run without O1's casts."""
    with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
        yield


def _in(
    function: Callable[P, T], choose: Callable[[list[torch.Tensor]], torch.dtype]
) -> Callable[P, T]:
    @wraps(function)
    def cast(*args: P.args, **kwargs: P.kwargs) -> T:
        given = [
            value
            for value in tree_flatten((args, kwargs))[0]
            if isinstance(value, torch.Tensor) and value.is_floating_point()
        ]
        if not given:
            return function(*args, **kwargs)
        dtype = choose(given)
        args, kwargs = tree_map_only(
            torch.Tensor,
            lambda t: t.to(dtype) if t.is_floating_point() else t,
            (args, kwargs),
        )
        with torch.autocast(given[0].device.type, enabled=False):
            return function(*args, **kwargs)

    return cast


def _widest(given: list[torch.Tensor]) -> torch.dtype:
    dtype = given[0].dtype
    for tensor in given[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype
