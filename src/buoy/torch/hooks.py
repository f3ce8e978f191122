"""Extension points of a scaler, and the extensions that it starts with.

A feature is an `Extension` that overrides the methods it needs.  The overridden methods
are collected into tuples once, so that a feature that is off costs nothing.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from buoy.torch.errors import StateError

__all__ = ["Extension", "Hooks", "compiled", "feature", "is_foreign"]


class Extension:
    """Base class of features: override the methods to call at points of an iteration.

    `scaler` is the `GradScaler`, `work` the state of one optimizer's gradients
    (`buoy.torch.iteration.Work`).  By default every method does nothing.

    Example:
        >>> import buoy.torch
        >>> class Print(Extension):
        ...     def concluded(self, scaler, works):
        ...         print("scale:", scaler.get_scale())
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> scaler = buoy.torch.GradScaler("cpu", init_scale=4.0)
        >>> scaler.attach(Print())
        >>> scaler.scale(weight.sum()).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
        scale: 4.0
    """

    key = ""  # its name, also that of its state in a checkpoint; empty: no state

    def loss_scaled(
        self, scaler: Any, loss: torch.Tensor, scaled: torch.Tensor
    ) -> None:
        """Called after a loss was multiplied by the scale."""

    def before_look(self, scaler: Any, work: Any) -> None:
        """Called before the gradients of `work.optimizer` are inspected."""

    def looked(self, scaler: Any, work: Any) -> None:
        """Called after inspection; `work.gathered` is still scaled."""

    def norm_taken(self, scaler: Any, work: Any) -> None:
        """Called with the norm over all ranks: see `work.norm`, `work.multiplier`."""

    def before_step(self, scaler: Any, work: Any) -> None:
        """Called before an optimizer steps; may call `work.veto`."""

    def stepped(self, scaler: Any, work: Any) -> None:
        """Called after it stepped or was skipped: see `work.outcome`."""

    def skipped(self, scaler: Any, work: Any) -> None:
        """Called after a skipped step, if the host knows the outcome."""

    def before_update(self, scaler: Any) -> None:
        """Called by `update`, before the scale moves."""

    def concluded(self, scaler: Any, works: list[Any]) -> None:
        """Called by `update`, after the scale has moved."""

    def state_dict(self) -> Any:
        """Return the state to save with the scaler, as plain values."""

    def load_state_dict(self, state: Any) -> None:
        """Restore a saved state."""


Hook = Callable[..., None]


class Hooks:
    """The extensions of one scaler, and the overridden methods per hook."""

    # These annotations are the list of hooks.
    loss_scaled: tuple[Hook, ...]
    before_look: tuple[Hook, ...]
    looked: tuple[Hook, ...]
    norm_taken: tuple[Hook, ...]
    before_step: tuple[Hook, ...]
    stepped: tuple[Hook, ...]
    skipped: tuple[Hook, ...]
    before_update: tuple[Hook, ...]
    concluded: tuple[Hook, ...]

    def __init__(self, scaler: Any, options: Any = None) -> None:
        self.extensions = [] if options is None else _default_extensions(options)
        self._scaler = scaler
        self.unclaimed: dict[str, Any] = {}  # loaded, of extensions not attached yet
        self.collect()

    def collect(self) -> None:
        """Collect the overridden methods."""
        self.by_key = {one.key: one for one in self.extensions}
        for point in Hooks.__annotations__:
            found = tuple(
                partial(getattr(one, point), self._scaler)
                for one in self.extensions
                if getattr(type(one), point) is not getattr(Extension, point)
            )
            setattr(self, point, found)

    def add(self, extension: Extension, *, first: bool = False) -> None:
        """Attach an extension, and restore its state if one was loaded before."""
        if extension.key in self.unclaimed:
            self._load({extension: extension.state_dict()}, self.unclaimed)
            del self.unclaimed[extension.key]
        self.extensions.insert(0 if first else len(self.extensions), extension)
        self.collect()

    def find(self, key: str) -> Any:
        """Return the extension with this key; None if there is none."""
        return self.by_key.get(key)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all extensions that have one, by key."""
        kept = dict(self.unclaimed)
        for one in self.extensions:
            state = one.state_dict() if one.key else None
            if state:
                kept[one.key] = state
        return kept

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """Restore each extension, or none; keep the rest for those attached later."""
        before = {x: x.state_dict() for x in self.extensions if x.key in states}
        self._load(before, states)
        self.unclaimed = {k: v for k, v in states.items() if k not in self.by_key}

    @staticmethod
    def _load(before: dict[Extension, Any], states: dict[str, Any]) -> None:
        """Restore extensions; if one raises, give all of them back what they had."""
        for one in before:
            try:
                one.load_state_dict(states[one.key])
            except Exception as error:
                for each, state in before.items():
                    each.load_state_dict(state)
                raise StateError(
                    f"The state of {one.key!r} is damaged, and nothing was loaded: "
                    f"{error}. It is {states[one.key]!r:.120}."
                ) from error


def feature(name: str) -> ModuleType:
    """Import a module of `buoy.torch.features` on first use."""
    return import_module(f"buoy.torch.features.{name}")


def is_foreign(method: Any) -> bool:
    """Return whether a subclass or a patch has replaced this method."""
    return not str(getattr(method, "__module__", "")).startswith("buoy.")


def compiled() -> ModuleType:
    """Import `features.compiled`; torch.compile cannot trace `import_module`."""
    from buoy.torch.features import compiled as module  # noqa: PLC0415

    return module


def _default_extensions(options: Any) -> list[Extension]:
    """Create the extensions that a scaler's options require."""
    found: list[Extension] = [feature("hints").Hints()]
    if options.spike_guard is not None:
        found.append(feature("spikes").Spikes(options.spike_guard))
    if options.skip == "joint":
        found.append(feature("joint").Joint())
    return found
