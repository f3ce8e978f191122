"""The report: one self-contained page about a recorded run, or several side by side.

It needs the extra `report` (Bokeh), whose runtime goes into the page.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from buoy.report.facts import Facts, sum_up
    from buoy.report.page import html, write
    from buoy.report.run import Run
    from buoy.report.words import summary

__all__ = ["Facts", "Run", "html", "sum_up", "summary", "write"]

_HOMES = {
    "Facts": "facts",
    "Run": "run",
    "html": "page",
    "sum_up": "facts",
    "summary": "words",
    "write": "page",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'buoy.report' has no attribute {name!r}")
    value = getattr(import_module(f"buoy.report.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
