"""The table of presets, and helpers for its rows."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from buoy._core.errors import PolicyError
from buoy._core.formats import FLOAT32_MAX, FLOAT32_TINY
from buoy._core.policies.policy import Policy

__all__ = [
    "FLOAT32_MAX",
    "FLOAT32_TINY",
    "PRESETS",
    "Preset",
    "check",
    "preset",
    "refuse",
]

Build = Callable[..., Policy]
_Build = TypeVar("_Build", bound=Build)


@dataclass(frozen=True, slots=True)
class Preset:
    """One row: an existing scaler's rule under its own parameter names."""

    name: str
    peer: str  # what it reproduces, and the version that was recorded
    build: Build

    @property
    def parameters(self) -> dict[str, Any]:
        """The peer's own parameters and their defaults."""
        signature = inspect.signature(self.build)
        return {name: p.default for name, p in signature.parameters.items()}

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return inspect.getdoc(self.build).partition("\n")[0]  # type: ignore[union-attr]


PRESETS: dict[str, Preset] = {}


def preset(peer: str) -> Callable[[_Build], _Build]:
    """Add the decorated function to the table under its own name."""

    def enter(build: _Build) -> _Build:
        PRESETS[build.__name__] = Preset(build.__name__, peer, build)
        return build

    return enter


CHOICES = {
    "mode": ("dynamic", "static"),
    "protocol": ("update_every_iteration", "update_on_success"),
    "api": ("apply", "stateless_apply"),
    "inner": ("new", "legacy"),
    "optimizer": ("ZeRO", "FP16_Optimizer", "FP16_UnfusedOptimizer"),
    "ordering": ("increment_after_update", "as_is"),
}


def check(row: Preset, given: dict[str, Any]) -> None:
    """Raise for invalid arguments, under the names that the user typed."""
    for name, value in given.items():
        hint = str(inspect.signature(row.build).parameters[name].annotation)
        problem = _problem(name, value, hint)
        if problem:
            raise refuse(row.name, name, value, problem)


def _problem(name: str, value: Any, hint: str) -> str | None:
    if value is None:
        return None if "None" in hint else "given"
    if isinstance(value, str):
        choices = CHOICES.get(name)
        if "str" not in hint:
            return "a number" if "bool" not in hint else "True or False"
        return f"one of {choices}" if choices and value not in choices else None
    if "bool" in hint:
        return None if isinstance(value, bool) else "True or False"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "a number"
    if value != value or (value < 0 and name != "initial_lg_loss_scale"):  # noqa: PLR0124
        return "a number of at least 0"
    if "int" in hint and "float" not in hint and value % 1 != 0:
        return "a whole number"
    if "int" in hint and "float" not in hint and value < 1 and name not in _MAY_BE_0:
        return "a whole number of at least 1"
    return None


_MAY_BE_0 = ("hysteresis", "zero_stage")


def refuse(name: str, field: str, value: object, accepted: str) -> PolicyError:
    """Return the error for a value that the peer's own constructor rejects."""
    return PolicyError(f"{name}: `{field}` must be {accepted}, got {value!r}.")
