"""The rules of existing scalers by name, with their own parameter names.

A preset reproduces its peer, quirks and bugs included; its docstring names the bugs.
"""

from buoy._core.policies.presets import elsewhere, fairseq, jax, pytorch
from buoy._core.policies.presets.peer import PeerBackoff
from buoy._core.policies.presets.quirks import Quirks
from buoy._core.policies.presets.table import PRESETS, Preset

__all__ = [
    "PRESETS",
    "PeerBackoff",
    "Preset",
    "Quirks",
    "elsewhere",
    "fairseq",
    "jax",
    "pytorch",
]
