"""The table of presets, and the pieces that several rows share."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from buoy._core.errors import PolicyError
from buoy._core.policy import Policy

__all__ = ["FLOAT32_MAX", "FLOAT32_TINY", "PRESETS", "Preset", "preset", "refuse"]

FLOAT32_MAX = float.fromhex("0x1.fffffep+127")
FLOAT32_TINY = 2.0**-126

Build = Callable[..., Policy]


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


def preset(peer: str) -> Callable[[Build], Build]:
    """Enter the decorated function into the table under its own name."""

    def enter(build: Build) -> Build:
        PRESETS[build.__name__] = Preset(build.__name__, peer, build)
        return build

    return enter


def refuse(name: str, field: str, value: Any, accepted: str) -> PolicyError:
    """Make the error for a value that the peer's own constructor refuses."""
    return PolicyError(f"{name}: `{field}` must be {accepted}, got {value!r}.")
