"""Run chosen modules in FP32 while the rest of the model runs in FP16.

No loss scale helps a module whose output exceeds FP16's range: its forward pass is inf
at every scale.
"""

import difflib
import fnmatch
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from buoy._backends.torch.rounding import HALVES
from buoy._core.errors import OptionError

__all__ = ["KeptFp32", "keep_fp32"]

Module = torch.nn.Module
Modules = dict[str, Module]


class KeptFp32(AbstractContextManager["KeptFp32"]):
    """Modules that run in FP32 until `undo` or the end of a `with` block."""

    def __init__(self, modules: Modules) -> None:
        self.names = tuple(modules)
        self._modules: list[tuple[Module, type[Module]]] = []  # and their classes
        self._tensors: list[tuple[torch.Tensor, torch.dtype]] = []  # and their dtypes
        for module in modules.values():
            if _kind_of(module) is None:
                self._keep(module)

    def _keep(self, module: Module) -> None:
        kind: Any = type(module)
        self._modules.append((module, kind))
        module.__class__ = _in_fp32(kind)
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.dtype in HALVES:
                self._tensors.append((tensor, tensor.dtype))
                _convert(tensor, torch.float32)

    def undo(self) -> None:
        """Restore the modules and the dtypes of their parameters."""
        for module, kind in self._modules:
            module.__class__ = kind
        for tensor, dtype in self._tensors:
            _convert(tensor, dtype)
        self._modules = []
        self._tensors = []

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self.names)})"


def _convert(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Change the dtype of a parameter or buffer in place, with its gradient."""
    tensor.data = tensor.data.to(dtype)
    if tensor.grad is not None:
        tensor.grad.data = tensor.grad.data.to(dtype)


def keep_fp32(
    model: Module, *names: str | Module | type[Module] | Iterable[Any]
) -> KeptFp32:
    """Run modules of a model in FP32, inside `torch.autocast` or an FP16 model.

    Autocast is off within them; half-precision inputs and parameters are cast to FP32.
    Under autocast the output stays FP32, so that values above 65504 survive until they
    are summed or normalised; otherwise it is cast back to the dtype of the input.

    Args:
        model: the model that contains the modules.
        names: names as in `model.named_modules()`, patterns with `*` and `?`,
            modules, classes of modules, or lists of these.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
        >>> kept = keep_fp32(model, "1")
        >>> with torch.autocast("cpu", torch.float16):
        ...     model(torch.ones(1, 1)).dtype
        torch.float32
        >>> kept.undo()
    """
    found = _matching(dict(model.named_modules()), names)
    if not found:
        raise OptionError(
            "No module was given. Pass names as in `model.named_modules()`."
        )
    return KeptFp32(found)


def _matching(known: Modules, name: Any) -> Modules:
    """Find the modules that are meant by a name, a pattern, a class, or a list."""
    if not isinstance(name, (str, Module, type)):
        return {key: m for one in name for key, m in _matching(known, one).items()}
    if isinstance(name, type):
        found = {key: m for key, m in known.items() if isinstance(m, name)}
        shown = f"of class {name.__name__}"
    elif isinstance(name, Module):
        found = {key: module for key, module in known.items() if module is name}
        shown = f"like the {type(name).__name__} given, which is not part of it"
    else:
        fits = [name] if name in known else fnmatch.filter(known, name)
        found = {key: known[key] for key in fits}
        shown = repr(name)
    if not found:
        raise OptionError(f"The model has no module {shown}. {_closest(known, name)}")
    return found


def _closest(known: Modules, name: object) -> str:
    names = [key for key in known if key]
    if near := difflib.get_close_matches(str(name), names, n=3, cutoff=0.5):
        return f"Did you mean {', '.join(map(repr, near))}?"
    return f"It has {len(names)}: {', '.join(map(repr, names[:5]))}, ..."


def _called(self: Module, *args: Any, **kwargs: Any) -> Any:
    """Call a kept module: autocast off, FP32 inputs, output dtype as expected."""
    inputs = (x for x in tree_leaves((args, kwargs)) if torch.is_tensor(x))
    first = next((x for x in inputs if x.is_floating_point()), None)
    device = "cpu" if first is None else first.device.type
    mixed = torch.is_autocast_enabled(device)
    with torch.autocast(device, enabled=False):
        args, kwargs = _cast((args, kwargs), HALVES, torch.float32)
        output = _kind_of(self).__call__(self, *args, **kwargs)
    if mixed or first is None or first.dtype not in HALVES:
        return output
    return _cast(output, {torch.float32}, first.dtype)


def _cast(tree: Any, sources: Collection[torch.dtype], target: torch.dtype) -> Any:
    """Cast the tensors of some dtypes in a pytree."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(target) if tensor.dtype in sources else tensor

    return tree_map_only(torch.Tensor, cast, tree)


def _reduced(self: Module, protocol: Any) -> Any:
    """Copy and pickle a kept module by its original class."""
    kind = _kind_of(self)
    made = kind.__reduce_ex__(self, protocol)
    return (_rebuilt, (kind,), *made[2:])


def _kind_of(module: Module) -> Any:
    return vars(type(module)).get("_buoy_kind")


@cache
def _in_fp32(kind: Any) -> Any:
    """Create the subclass whose modules run in FP32.

    A class, not a hook: it restores autocast if the module raises, it is copied and
    pickled with the module, and it encloses every wrapper of `forward`.
    """
    own = {"__call__": _called, "__reduce_ex__": _reduced, "_buoy_kind": kind}
    return type(kind.__name__, (kind,), own)


def _rebuilt(kind: Any) -> Any:
    return object.__new__(_in_fp32(kind))
