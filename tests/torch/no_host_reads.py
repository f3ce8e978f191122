"""A mode in which asking a tensor for its value is an error.

Both roads are closed: the methods of `torch.Tensor` that return plain values, and the
operators by which any code, torch's own included, reads a value on the host.  Buoy
reads its own numbers on a CPU, where that costs nothing; within this mode it takes
every tensor for one of a device, which has to be asked.
"""

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from buoy._backends import torch as backend
from buoy._backends.torch import reader

METHODS = {
    "item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__",
    "__complex__", "__array__", "__contains__", "is_nonzero",
}  # fmt: skip
OPERATORS = {
    "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select",
    "repeat_interleave", "unique_consecutive", "_unique2", "bincount",
}  # fmt: skip


class HostReadError(Exception):
    """A value was read on the host."""


class _Methods(TorchFunctionMode):
    def __init__(self, allowed: set[int]) -> None:
        super().__init__()
        self.allowed = allowed

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ):
        name = getattr(func, "__name__", "")
        caller = sys._getframe(1).f_code.co_filename
        if caller == reader.__file__:  # a copy in the host's memory, and complete
            return func(*args, **(kwargs or {}))
        if name in METHODS and id(args[0]) not in self.allowed:
            raise HostReadError(name)
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __init__(self, allowed: set[int]) -> None:
        super().__init__()
        self.allowed = allowed

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ):
        name = func.overloadpacket.__name__
        if name in OPERATORS and id(args[0]) not in self.allowed:
            raise HostReadError(name)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def no_host_reads(
    allowed: Iterable[torch.Tensor] = (),
) -> Iterator[None]:
    """Raise `HostReadError` on any host read, but of the `allowed` tensors."""
    ids = {id(tensor) for tensor in allowed}
    seen = backend.in_host_memory
    backend.in_host_memory = lambda tensor: False
    try:
        with _Methods(ids), _Operators(ids):
            yield
    finally:
        backend.in_host_memory = seen
