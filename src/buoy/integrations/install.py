"""`buoy.torch.install`: Buoy's scaler under torch's names.

For training libraries that create their own scaler.  Each class of torch is replaced
under every name by which a loaded module holds it; modules that are imported later
import ours from torch.  Ours derive from torch's, as `isinstance` checks expect.
"""

import inspect
import sys
import warnings
from abc import ABCMeta
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.cpu.amp.grad_scaler
import torch.cuda.amp

from buoy._core.policies.policy import Policy
from buoy.integrations.common import Metrics, metrics
from buoy.torch import GradScaler
from buoy.trace.record import Recorder

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Installation", "ShardedGradScaler", "install"]

_TRACED = 4  # scalers of one program that are recorded
_OF_TORCHS_RULE = {
    "init_scale": 2.0**16,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
}


@dataclass(eq=False)
class Installation:
    """Scalers of Buoy under torch's names, until `undo` or the end of a `with` block.

    `scalers` holds those that were created.
    """

    # None: torch's rule, with the caller's arguments.
    policy: str | Policy | None = None
    options: dict[str, Any] = field(default_factory=dict)
    scalers: list[GradScaler] = field(default_factory=list)
    # Called with the settings of the program that the policy replaces.
    on_replaced: Callable[[dict[str, Any]], object] | None = None
    _pairs: list[tuple[type, type]] = field(default_factory=list)  # theirs, ours

    def apply(self) -> Self:
        """Replace torch's classes."""
        self._pairs = _classes(self)
        _replace({id(theirs): ours for theirs, ours in self._pairs})
        return self

    def undo(self) -> None:
        """Restore torch's classes; scalers that were created keep working."""
        _replace({id(ours): theirs for theirs, ours in self._pairs})
        self._pairs = []

    def close(self) -> None:
        """Close the traces."""
        for recorder in self._recorders():
            recorder.close()

    @property
    def traces(self) -> list[Path]:
        """The recorded files; complete after `close`."""
        return [recorder.path for recorder in self._recorders() if recorder.path]

    def metrics(self) -> dict[str, float]:
        """Return what to log: `buoy/scale`, `buoy/skipped` and `buoy/norm`.

        Of the last scaler that was created; nothing before its first step, and of a
        disabled one.  The norm is left out if the step was skipped, or if the library
        clips the gradients itself.
        """
        return metrics(self.scalers[-1]) if self.scalers else {}

    def _recorders(self) -> list[Recorder]:
        found = [scaler.trace for scaler in self.scalers if scaler.is_enabled()]
        return [recorder for recorder in found if recorder is not None]

    def arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of the next scaler, from those of its caller."""
        if self.policy is not None:
            own = {k: given.pop(k) for k in _OF_TORCHS_RULE if k in given}
            chosen = {k: v for k, v in own.items() if v != _OF_TORCHS_RULE[k]}
            if given.get("enabled", True):
                self.replaces(chosen)
            given["policy"] = self.policy
        given |= self.options
        given.setdefault("managed", given.get("sync") != "never")
        to_file = isinstance(given.get("trace"), (str, Path))
        if to_file and len(self.scalers) >= _TRACED:
            given["trace"] = None
        return given

    def replaces(self, settings: dict[str, Any]) -> None:
        """Report settings of the program that the policy replaces."""
        if self.on_replaced is not None:
            self.on_replaced(settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def install(policy: str | Policy | None = None, **options: Any) -> Installation:
    """Put Buoy's scaler under torch's names, for libraries that create their own.

    Call it before the library creates its scaler.  `torch.amp.GradScaler`, its
    deprecated forms in `torch.cuda.amp` and `torch.cpu.amp`, and FSDP's
    `ShardedGradScaler` are replaced in all modules.  Undo it with the returned object,
    or use that as a context manager.

    Args:
        policy: a policy or its name; the library's own numbers (`init_scale`, ...) are
            then not used.  None: torch's rule, with the library's numbers.
        options: further arguments of `GradScaler`.  They take precedence over those of
            the library.  `managed` is True unless it is given, or `sync="never"` is.

    Example:
        >>> with install(growth_interval=100) as installed:
        ...     scaler = torch.amp.GradScaler("cpu")
        >>> scaler.get_growth_interval(), installed.scalers == [scaler]
        (100, True)
    """
    return Installation(policy, options).apply()


class ShardedGradScaler(GradScaler):
    """`GradScaler` with the arguments of `torch.distributed.fsdp`'s ShardedGradScaler.

    Every `GradScaler` of Buoy makes all ranks agree; this one only takes torch's
    arguments in torch's order, `backoff_factor` before `growth_factor`.  Others are
    keyword-only, and are those of `GradScaler`.

    Example:
        >>> scaler = ShardedGradScaler("cpu", 2.0**10, 0.25)
        >>> scaler.get_backoff_factor()
        0.25
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: "ProcessGroup | None" = None,
        **options: Any,
    ) -> None:
        # Not `super()`: `install` puts a class between them.
        GradScaler.__init__(
            self,
            device,
            init_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            enabled,
            process_group=process_group,
            **options,
        )
        self.process_group = process_group


def _replace(pairs: dict[int, type]) -> None:
    """Replace classes, by identity, in every loaded module."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "buoy" or not hasattr(module, "__dict__"):
            continue
        for key, value in list(vars(module).items()):
            if id(value) in pairs:
                setattr(module, key, pairs[id(value)])


def _classes(chosen: Installation) -> list[tuple[type, type]]:
    """Create a class of ours for each of torch's; return pairs of theirs and ours."""
    amp = _like(torch.amp.GradScaler, (GradScaler,), chosen)
    cuda = _like(torch.cuda.amp.GradScaler, (amp,), chosen, "cuda")
    cpu = _like(torch.cpu.amp.grad_scaler.GradScaler, (amp,), chosen, "cpu")
    found: list[tuple[type, type]] = [
        (torch.amp.GradScaler, amp),
        (torch.cuda.amp.GradScaler, cuda),
        (torch.cpu.amp.grad_scaler.GradScaler, cpu),
    ]
    if torch.distributed.is_available():
        # Imported now, so that modules that import it later find it replaced.
        from torch.distributed.fsdp import sharded_grad_scaler  # noqa: PLC0415

        sharded = sharded_grad_scaler.ShardedGradScaler
        found.append((sharded, _like(sharded, (ShardedGradScaler, amp), chosen)))
    return found


def _like(
    theirs: type,
    bases: tuple[type[GradScaler], ...],
    chosen: Installation,
    device: str | None = None,
) -> type[GradScaler]:
    """Create a subclass that takes the arguments of a class of torch.

    `device` is set for the deprecated classes, which do not take it.
    """
    own = ShardedGradScaler if ShardedGradScaler in bases else GradScaler
    init: Callable[..., None] = own.__init__
    signature = inspect.signature(init)

    @wraps(init)
    def __init__(self: GradScaler, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        if device is not None:
            warnings.warn(
                f"`torch.{device}.amp.GradScaler(args...)` is deprecated. Please use "
                f"`torch.amp.GradScaler('{device}', args...)` instead.",
                FutureWarning,
                stacklevel=2,
            )
            args = (device, *args)
        given = dict(signature.bind(self, *args, **kwargs).arguments)
        del given["self"]
        given |= given.pop("options", {})
        arguments = chosen.arguments(given)
        init(self, **arguments)
        if arguments["managed"] and self.is_enabled():
            self.attach(Metrics())
        chosen.scalers.append(self)

    def _configure(self: GradScaler, name: str, value: Any) -> None:
        if chosen.policy is None:
            GradScaler._configure(self, name, value)
        elif self.is_enabled():  # an error would end a program that torch accepts
            chosen.replaces({name: value})

    def __subclasshook__(cls: type, other: type) -> Any:  # noqa: N807
        # Scalers that were created elsewhere are instances of torch's class only.
        return (cls is made and issubclass(other, theirs)) or NotImplemented

    names = {
        "__init__": __init__,
        "__subclasshook__": classmethod(__subclasshook__),
        "_configure": _configure,
        "__doc__": GradScaler.__doc__,
        # Pickle looks a class up by these.
        "__module__": theirs.__module__,
        "__qualname__": theirs.__qualname__,
    }
    made: Any = ABCMeta(theirs.__name__, bases, names)
    replacement: type[GradScaler] = made
    return replacement
