"""Put Buoy's scaler in the place of torch's, for a program that does not know of it.

Every class is replaced under every name that a loaded module keeps it by, before the
program is run: however it spells its import, and whichever library makes the scaler,
it gets ours.  Ours derive from torch's, so `isinstance` says what it said.
"""

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.cpu.amp.grad_scaler
import torch.cuda.amp

from buoy._core.policies.policy import Policy
from buoy.torch import GradScaler
from buoy.trace.record import Recorder

__all__ = ["Replacement", "replaced"]

_TRACED = 4  # scalers of one program that are recorded
_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(torch.amp.GradScaler).parameters.items()
}


@dataclass
class Replacement:
    """How the program's scalers are to be, and which there were."""

    policy: Policy | None = None  # None: torch's rule, with the program's arguments
    trace: Path | None = None
    made: list[GradScaler] = field(default_factory=list)
    on_replaced: Callable[[dict[str, Any]], object] | None = None

    def replaces(self, settings: dict[str, Any]) -> None:
        """Report settings of the program that the policy replaces."""
        if self.on_replaced is not None:
            self.on_replaced(settings)

    def options(self) -> dict[str, Any]:
        """Give what a scaler is made with beyond the program's own arguments."""
        found: dict[str, Any] = {}
        if self.policy is not None:
            found["policy"] = self.policy
        if self.trace is not None and len(self.made) < _TRACED:
            found["trace"] = self._path(len(self.made))
        return found

    def _path(self, number: int) -> Path | None:
        if self.trace is None or not number:
            return self.trace
        return self.trace.with_stem(f"{self.trace.stem}-{number + 1}")

    @property
    def traces(self) -> list[Path]:
        """The files that were written, once they are closed."""
        return [recorder.path for recorder in self._recorders() if recorder.path]

    def close(self) -> None:
        """Write what is left to write."""
        for recorder in self._recorders():
            recorder.close()

    def _recorders(self) -> list[Recorder]:
        found = [scaler.trace for scaler in self.made if scaler.is_enabled()]
        return [recorder for recorder in found if recorder is not None]


@contextmanager
def replaced(replacement: Replacement) -> Iterator[Replacement]:
    """Have torch's scalers be ours within the block."""
    pairs = _classes(replacement)
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] == "buoy" or not hasattr(module, "__dict__"):
                continue
            for key, value in list(vars(module).items()):
                ours = pairs.get(id(value))
                if ours is not None and isinstance(value, type):
                    stack.callback(setattr, module, key, value)
                    setattr(module, key, ours)
        yield replacement


def _classes(chosen: Replacement) -> dict[int, type]:
    """Make a class of ours for each of torch's, with its signature."""
    ours = _amp(chosen)
    found = {
        id(torch.amp.GradScaler): ours,
        id(torch.cuda.amp.GradScaler): _old(ours, "cuda"),
        id(torch.cpu.amp.grad_scaler.GradScaler): _old(ours, "cpu"),
    }
    if torch.distributed.is_available():
        # Loaded now, so that who imports it later finds it replaced.
        from torch.distributed.fsdp import sharded_grad_scaler  # noqa: PLC0415

        found[id(sharded_grad_scaler.ShardedGradScaler)] = _sharded(ours)
    return found


def _amp(chosen: Replacement) -> type[GradScaler]:
    class AmpGradScaler(GradScaler):
        """`torch.amp.GradScaler`, as `buoy run` makes it."""

        def __init__(
            self,
            device: str = "cuda",
            init_scale: float = 2.0**16,
            growth_factor: float = 2.0,
            backoff_factor: float = 0.5,
            growth_interval: int = 2000,
            enabled: bool = True,  # noqa: FBT001, FBT002 - torch's own signature
            **options: Any,
        ) -> None:
            given = {
                "init_scale": init_scale,
                "growth_factor": growth_factor,
                "backoff_factor": backoff_factor,
                "growth_interval": growth_interval,
            }
            if chosen.policy is not None:  # they are parameters of torch's rule
                own = {name: x for name, x in given.items() if x != _DEFAULTS[name]}
                given.clear()
                if enabled:
                    chosen.replaces(own)
            options = {**given, **options, **chosen.options()}
            super().__init__(device, enabled=enabled, **options)
            chosen.made.append(self)

        def _configure(self, name: str, value: Any) -> None:
            if chosen.policy is None:
                super()._configure(name, value)
            elif self.is_enabled():  # an error would end a program that torch accepts
                chosen.replaces({name: value})

    return _named(AmpGradScaler, torch.amp.GradScaler)


def _old(ours: type[GradScaler], device: str) -> type[GradScaler]:
    theirs = getattr(torch, device).amp.GradScaler

    class OldGradScaler(ours):  # type: ignore[misc, valid-type]
        """`torch.cuda.amp.GradScaler` or its like: no device to be given."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            warnings.warn(
                f"`torch.{device}.amp.GradScaler(args...)` is deprecated. Please use "
                f"`torch.amp.GradScaler('{device}', args...)` instead.",
                FutureWarning,
                stacklevel=2,
            )
            super().__init__(device, *args, **kwargs)

    return _named(OldGradScaler, theirs)


def _sharded(ours: type[GradScaler]) -> type[GradScaler]:
    from torch.distributed.fsdp.sharded_grad_scaler import (  # noqa: PLC0415
        ShardedGradScaler,
    )

    class OurShardedGradScaler(ours):  # type: ignore[misc, valid-type]
        """FSDP's scaler: other order of arguments; ranks agree in ours anyway."""

        def __init__(
            self,
            device: str = "cuda",
            init_scale: float = 2.0**16,
            backoff_factor: float = 0.5,
            growth_factor: float = 2.0,
            growth_interval: int = 2000,
            enabled: bool = True,  # noqa: FBT001, FBT002 - torch's own signature
            process_group: Any = None,
        ) -> None:
            super().__init__(
                device,
                init_scale,
                growth_factor,
                backoff_factor,
                growth_interval,
                enabled=enabled,
                process_group=process_group,
            )
            self.process_group = process_group

    return _named(OurShardedGradScaler, ShardedGradScaler)


def _named(made: type[GradScaler], theirs: type) -> type[GradScaler]:
    """Give ours the name that it is found by, or it could not be pickled."""
    made.__name__, made.__qualname__ = theirs.__name__, theirs.__qualname__
    made.__module__ = theirs.__module__
    return made
