"""Observe calls of other libraries' functions, without changing them."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from types import FrameType, ModuleType
from typing import ParamSpec, TypeVar

import torch
from torch.amp.grad_scaler import GradScaler as TorchGradScaler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from buoy.diagnose.rehearse import with_subclasses

__all__ = ["Patches", "place", "scalers", "schedulers"]

P = ParamSpec("P")
R = TypeVar("R")

# Called with the arguments of the wrapped function; `After` with its result first.
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
        kinds: Iterable[type],
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
        owner: type | ModuleType,
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

    def put(
        self, owner: type | ModuleType, name: str, replacement: Callable[..., object]
    ) -> None:
        """Put something in a function's place, until all is removed."""
        self._stack.callback(setattr, owner, name, vars(owner)[name])
        setattr(owner, name, replacement)

    def _wrapped(
        self,
        original: Callable[P, R],
        label: str,
        before: Before | None,
        after: After | None,
    ) -> Callable[P, R]:
        @wraps(original)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
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


def scalers() -> list[type[TorchGradScaler]]:
    """List torch's scaler and all that derive from it, Buoy's among them."""
    import buoy.torch  # noqa: F401, PLC0415 - or it could not be among them

    return with_subclasses(TorchGradScaler)


def schedulers() -> list[type[LRScheduler]]:
    """List the schedulers that advance by steps, not by a metric."""
    kinds = with_subclasses(LRScheduler)
    return [kind for kind in kinds if not issubclass(kind, ReduceLROnPlateau)]


def place() -> str:
    """Return the place in the user's own code, as file:line."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not _is_machinery(file):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _is_machinery(file: str) -> bool:
    """Return whether code is ours, torch's, or stands between them and the user's."""
    if file.startswith((_OWN, _TORCH, "<")):
        return True
    return "contextlib" in file or "functools" in file
