"""Which modules are run: their names, and the first whose output is not finite."""

from collections.abc import Iterator

import torch
from torch.nn.modules import module as modules
from torch.utils.hooks import RemovableHandle

from buoy.diagnose.hooks import float_tensors, size_of

__all__ = ["Modules"]

_ROOTS = 16  # models that are remembered


class Modules:
    """Remembers the outermost modules that were called."""

    def __init__(self) -> None:
        self.first_nonfinite = ""
        self._roots: dict[int, torch.nn.Module] = {}
        self._depth = 0
        self._closely = False

    def hooks(self) -> Iterator[RemovableHandle]:
        """Put hooks on all modules, of now and later."""
        yield modules.register_module_forward_pre_hook(self._enter)
        yield modules.register_module_forward_hook(self._leave, always_call=True)

    def look_closely(self) -> None:
        """Find the first output that is not finite, from now on."""
        self._closely = True

    def name_of(self, param: torch.Tensor) -> str:
        """Name a parameter as the model that was called does."""
        for root in self._roots.values():
            for name, other in root.named_parameters():
                if other is param:
                    return name
        return f"a parameter of shape {tuple(param.shape)}"

    def _enter(self, module: torch.nn.Module, args: object) -> None:
        del args
        if not self._depth and len(self._roots) < _ROOTS:
            self._roots[id(module)] = module
        self._depth += 1

    def _leave(self, module: torch.nn.Module, args: object, output: object) -> None:
        self._depth -= 1
        if not self._closely or self.first_nonfinite:
            return
        if not _finite(output) and _finite(args):
            self.first_nonfinite = self._name(module)

    def _name(self, module: torch.nn.Module) -> str:
        for root in self._roots.values():
            for name, other in root.named_modules():
                if other is module:
                    return name or type(module).__name__
        return type(module).__name__


def _finite(values: object) -> bool:
    return size_of(float_tensors(values), masks=True).finite
