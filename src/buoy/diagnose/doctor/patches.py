"""Observe calls of other libraries' functions, without changing them."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler as TorchGradScaler
from torch.optim.lr_scheduler import LRScheduler

__all__ = ["Patches", "place", "scalers", "schedulers"]

Before = Callable[..., None]
After = Callable[..., None]

_OWN = str(Path(__file__).parents[2])
_TORCH = str(Path(torch.__file__).parent)


class Patches:
    """Wraps methods and functions; calls within calls of the same are not seen."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.running: list[str] = []  # names of the wrapped calls that are going on

    def remove(self) -> None:
        """Put everything back."""
        self._stack.close()

    def also(self, undo: Callable[[], object]) -> None:
        """Have something else undone too."""
        self._stack.callback(undo)

    def method(
        self,
        kinds: list[type],
        name: str,
        before: Before | None = None,
        after: After | None = None,
        *,
        label: str = "",
    ) -> None:
        """Wrap a method in every class that defines it; `label` tells them apart."""
        for kind in kinds:
            if name in vars(kind):
                self.attribute(kind, name, before, after, label=label)

    def attribute(
        self,
        owner: Any,
        name: str,
        before: Before | None = None,
        after: After | None = None,
        *,
        label: str = "",
    ) -> None:
        """Wrap one function where it is kept: `before(*args)`, `after(result, ...)`."""
        original = vars(owner)[name]
        wrapper = self._wrapped(original, label or name, before, after)
        self.put(owner, name, wrapper)

    def put(self, owner: Any, name: str, replacement: Any) -> None:
        """Put something in a function's place, until all is removed."""
        self._stack.callback(setattr, owner, name, vars(owner)[name])
        setattr(owner, name, replacement)

    def _wrapped(
        self, original: Any, label: str, before: Before | None, after: After | None
    ) -> Any:
        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            outermost = label not in self.running
            if outermost and before is not None:
                before(*args, **kwargs)
            with self._entered(label):
                result = original(*args, **kwargs)
            if outermost and after is not None:
                after(result, *args, **kwargs)
            return result

        return call

    @contextmanager
    def _entered(self, label: str) -> Iterator[None]:
        self.running.append(label)
        try:
            yield
        finally:
            self.running.pop()


def _families(root: type) -> list[type]:
    """List a class and all that derive from it."""
    found, queue = [], [root]
    while queue:
        kind = queue.pop()
        found.append(kind)
        queue += kind.__subclasses__()
    return list(dict.fromkeys(found))


def scalers() -> list[type]:
    """List torch's scaler and all that derive from it, Buoy's among them."""
    import buoy.torch  # noqa: F401, PLC0415 - or it could not be among them

    return _families(TorchGradScaler)


def schedulers() -> list[type]:
    """List the schedulers that advance by steps, not by a metric."""
    metric = torch.optim.lr_scheduler.ReduceLROnPlateau
    return [kind for kind in _families(LRScheduler) if not issubclass(kind, metric)]


def place() -> str:
    """Tell where in the user's own code we are, as file:line."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        strange = name.startswith((_OWN, _TORCH, "<")) or "contextlib" in name
        if not strange and "functools" not in name:
            return f"{Path(name).name}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""
