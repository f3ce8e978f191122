"""Warn with the location of the user's code that called Buoy."""

import sys
import warnings

from buoy._core.errors import BuoyWarning

__all__ = ["warn"]

# Torch's base classes and JAX's tracing call back into Buoy: skip their frames, too.
_INSIDE = ("buoy", "torch", "jax")


def warn(message: str, category: type[Warning] = BuoyWarning) -> None:
    """Warn, attributed to the first caller outside of Buoy and its frameworks."""
    warnings.warn(message, category, stacklevel=_levels())


def _levels() -> int:
    """Count the frames from `warn` up to that caller; `warn` itself is the first."""
    frame = sys._getframe(1)  # noqa: SLF001 - `inspect.stack` would read source files
    levels = 1
    while frame.f_back is not None and _inside(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
        levels += 1
    return levels


def _inside(module: str) -> bool:
    return module.split(".", 1)[0] in _INSIDE
