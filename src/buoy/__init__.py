"""Buoy keeps half-precision gradients afloat.

Dynamic loss scaling for mixed-precision training: one pure core here, and front ends
in `buoy.torch`, `buoy.jax` and `buoy.keras`.  Importing this imports no framework.
"""

from buoy._core.backoff import Backoff
from buoy._core.codec import decode, encode
from buoy._core.errors import (
    BuoyError,
    CallOrderError,
    MissingBackendError,
    PolicyError,
    ScaleCollapsedError,
    StateVersionError,
    TraceError,
    UnknownPolicyError,
)
from buoy._core.formats import FORMATS, Format, number_format
from buoy._core.headroom import Headroom
from buoy._core.importers import Imported, import_state
from buoy._core.lognormal import LogNormal
from buoy._core.policy import Policy
from buoy._core.quirks import Quirks
from buoy._core.registry import policies, policy
from buoy._core.state import Seen, Step, Verdict
from buoy._core.static import NoScaling, Static

__all__ = [
    "FORMATS",
    "Backoff",
    "BuoyError",
    "CallOrderError",
    "Format",
    "Headroom",
    "Imported",
    "LogNormal",
    "MissingBackendError",
    "NoScaling",
    "Policy",
    "PolicyError",
    "Quirks",
    "ScaleCollapsedError",
    "Seen",
    "StateVersionError",
    "Static",
    "Step",
    "TraceError",
    "UnknownPolicyError",
    "Verdict",
    "decode",
    "encode",
    "import_state",
    "number_format",
    "policies",
    "policy",
]
