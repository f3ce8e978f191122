"""Warn where the user can act: at the line that called Buoy, however deep the cause."""

import sys
import warnings

__all__ = ["warn"]

# Torch stands between, too: its decorators and base classes call back into Buoy.
_INSIDE = ("buoy", "torch")


def warn(message: str, category: type[Warning]) -> None:
    """Warn in the name of the first caller outside of Buoy and torch."""
    warnings.warn(message, category, stacklevel=_levels())


def _levels() -> int:
    """Count the frames from `warn` up to that caller; `warn` itself is the first."""
    frame = sys._getframe(1)  # `inspect.stack` would read source files
    levels = 1
    while frame.f_back is not None and _inside(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
        levels += 1
    return levels


def _inside(module: str) -> bool:
    return module.split(".", 1)[0] in _INSIDE
