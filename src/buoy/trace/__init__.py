"""Traces: the recorded history of a run, or an invented one.

`read` and `write` know the file, `synthetic` invents; `buoy.replay` and `buoy.tune`
take what they return.  Standard library only.
"""

from buoy._core.trace import Histogram, Trace
from buoy.trace.read import read
from buoy.trace.synthetic import KINDS, synthetic
from buoy.trace.write import write

__all__ = ["KINDS", "Histogram", "Trace", "read", "synthetic", "write"]
