"""Traces: the recorded history of a run, or a synthetic one.

`Recorder` records a run while it trains, and `load` reads it back.  `read` returns a
`Trace` for `buoy.replay` and `buoy.tune`, from a recorded run or from a file that
`write` has written; `synthetic` generates one.  Standard library only.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from buoy._core.replay.trace import Histogram, Trace
from buoy._core.step import Row
from buoy.trace.read import read
from buoy.trace.synthetic import KINDS, synthetic
from buoy.trace.write import write

if TYPE_CHECKING:
    from buoy.trace.counts import Counts, Shot
    from buoy.trace.outlet import Sink
    from buoy.trace.record import Recorder, TraceWarning
    from buoy.trace.recording import Recording, load

__all__ = [
    "KINDS",
    "Counts",
    "Histogram",
    "Recorder",
    "Recording",
    "Row",
    "Shot",
    "Sink",
    "Trace",
    "TraceWarning",
    "load",
    "read",
    "synthetic",
    "write",
]

# Imported when first asked for: SQLite and threads are slow to load.
_HOMES = {
    "Counts": "counts",
    "Recorder": "record",
    "Recording": "recording",
    "Shot": "counts",
    "Sink": "outlet",
    "TraceWarning": "record",
    "load": "recording",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'buoy.trace' has no attribute {name!r}")
    value = getattr(import_module(f"buoy.trace.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
