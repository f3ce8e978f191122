"""Each existing scaler's rule by name, under its own parameter names.

A preset reproduces its peer, quirks and bugs included; its docstring names the bugs.
"""

from buoy._core.policies.presets import elsewhere, fairseq, jax, pytorch
from buoy._core.policies.presets.table import PRESETS, Preset

__all__ = ["PRESETS", "Preset", "elsewhere", "fairseq", "jax", "pytorch"]
