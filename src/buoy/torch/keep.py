"""Run chosen modules in FP32 while the rest of the model runs in FP16.

For a module whose output leaves FP16's range no loss scale can help: its forward pass
is inf whatever the gradients are multiplied by.
"""

import difflib
import fnmatch
from collections.abc import Iterable
from types import new_class
from typing import Any, Self

import torch
from torch.utils._pytree import tree_map_only

from buoy.torch.errors import UnknownModuleError
from buoy.torch.rounding import HALVES

__all__ = ["KeptFp32", "keep_fp32"]


class KeptFp32:
    """Which modules were made to run in FP32, and how they were before.

    Used in a `with` statement, or through `undo`.
    """

    def __init__(self, modules: dict[str, torch.nn.Module]) -> None:
        self.names = tuple(modules)
        self._changed = [
            (module, *_widened(module))
            for module in modules.values()
            if _kind_of(module) is None
        ]

    def undo(self) -> None:
        """Let the modules run as before, with parameters of the dtypes they had."""
        for module, kind, halves in self._changed:
            module.__class__ = kind
            for tensor, dtype in halves:
                tensor.data = tensor.data.to(dtype)
        self._changed = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self.names)})"


def keep_fp32(
    model: torch.nn.Module,
    *names: str | torch.nn.Module | type[torch.nn.Module] | Iterable[str],
) -> KeptFp32:
    """Run modules of a model in FP32, inside `torch.autocast` or an FP16 model.

    Autocast is off within them, half-precision inputs are cast to FP32, and so are
    their own parameters if they are not.  Under autocast the output stays FP32, which
    is what saves a value beyond 65504 until something adds it up or normalises it;
    without, it is cast back to what came in.

    Args:
        model: where the names belong to.
        names: of modules, as in `model.named_modules()`; patterns with `*` and `?`;
            modules; classes, for all modules of a kind; or lists of such.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
        >>> kept = keep_fp32(model, "1")
        >>> with torch.autocast("cpu", torch.float16):
        ...     model(torch.ones(1, 1)).dtype
        torch.float32
        >>> kept.undo()
    """
    known = dict(model.named_modules())
    found: dict[str, torch.nn.Module] = {}
    for name in _flat(names):
        found.update(_matching(known, name))
    if not found:
        raise UnknownModuleError(
            "No module was named. Pass names as in `model.named_modules()`, e.g. "
            "`keep_fp32(model, 'layers.0.mlp.down_proj')`."
        )
    return KeptFp32(found)


def _flat(names: Iterable[Any]) -> Iterable[Any]:
    for name in names:
        if isinstance(name, (str, torch.nn.Module, type)):
            yield name
        else:
            yield from _flat(name)


def _matching(
    known: dict[str, torch.nn.Module],
    name: str | torch.nn.Module | type[torch.nn.Module],
) -> dict[str, torch.nn.Module]:
    if isinstance(name, type):
        found = {key: m for key, m in known.items() if isinstance(m, name)}
        shown = f"of class {name.__name__}"
    elif isinstance(name, torch.nn.Module):
        found = {key: module for key, module in known.items() if module is name}
        shown = f"like the {type(name).__name__} given, which is not part of it"
    else:
        fits = [name] if name in known else fnmatch.filter(known, name)
        found = {key: known[key] for key in fits}
        shown = repr(name)
    if found:
        return found
    raise UnknownModuleError(f"The model has no module {shown}. {_near(known, name)}")


def _near(known: dict[str, torch.nn.Module], name: object) -> str:
    names = [key for key in known if key]
    near = difflib.get_close_matches(str(name), names, n=3, cutoff=0.5)
    tail = str(name).rpartition(".")[2]
    near += [k for k in names if k.rpartition(".")[2] == tail and k not in near][:3]
    if near:
        return f"Did you mean {', '.join(map(repr, near))}?"
    some = ", ".join(map(repr, names[:5]))
    return f"It has {len(names)}: {some}{' ...' if len(names) > 5 else ''}."


def _widened(
    module: torch.nn.Module,
) -> tuple[type[torch.nn.Module], list[tuple[torch.Tensor, torch.dtype]]]:
    """Change a module's class, and its tensors to FP32; return what they were."""
    halves = []
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.dtype in HALVES:
            halves.append((tensor, tensor.dtype))
            tensor.data = tensor.data.float()
            if tensor.grad is not None:
                tensor.grad.data = tensor.grad.data.float()
    kind = type(module)
    module.__class__ = _in_fp32(kind)
    return kind, halves


def _called(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a kept module: autocast off, FP32 in, and out what its neighbours expect."""
    first = _first((*args, *kwargs.values()))
    device = "cpu" if first is None else first.device.type
    mixed = torch.is_autocast_enabled(device)
    with torch.autocast(device, enabled=False):
        wide = tree_map_only(torch.Tensor, _wide, (args, kwargs))
        output = _kind_of(self).__call__(self, *wide[0], **wide[1])
    if mixed or first is None or first.dtype not in HALVES:
        return output
    dtype = first.dtype
    return tree_map_only(
        torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, output
    )


def _reduced(self: torch.nn.Module, protocol: Any) -> Any:
    """Copy and pickle a kept module by the class it had."""
    kind = _kind_of(self)
    made = kind.__reduce_ex__(self, protocol)
    return (_rebuilt, (kind,), *made[2:])


def _kind_of(module: torch.nn.Module) -> Any:
    return vars(type(module)).get("_buoy_kind")


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in HALVES else tensor


def _first(given: Iterable[Any]) -> torch.Tensor | None:
    """Find the first floating-point tensor among a module's inputs."""
    for value in given:
        if isinstance(value, torch.Tensor):
            if value.is_floating_point():
                return value
        elif isinstance(value, (list, tuple)):
            found = _first(value)
            if found is not None:
                return found
        elif isinstance(value, dict):
            found = _first(value.values())
            if found is not None:
                return found
    return None


_KINDS: dict[type[torch.nn.Module], type[torch.nn.Module]] = {}


def _in_fp32(kind: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Make, once, the class of modules of a kind that run in FP32.

    A class and not a hook: autocast comes back on when the module raises, it is copied
    and pickled with the module, and it encloses whatever wraps `forward`.
    """
    if kind not in _KINDS:
        own = {"__call__": _called, "__reduce_ex__": _reduced, "_buoy_kind": kind}
        _KINDS[kind] = new_class(kind.__name__, (kind,), {}, lambda to: to.update(own))
    return _KINDS[kind]


def _rebuilt(kind: type[torch.nn.Module]) -> torch.nn.Module:
    made: torch.nn.Module = object.__new__(_in_fp32(kind))
    return made
