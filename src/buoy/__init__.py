"""Buoy: dynamic loss scaling for mixed-precision training.

This module holds the core: policies, traces and replay.  The front ends are
`buoy.torch`, `buoy.jax`, `buoy.keras` and `buoy.tensorflow`.  Importing this module
imports no framework, and only the parts of Buoy that are used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from buoy._version import __version__ as __version__

if TYPE_CHECKING:
    from buoy import trace
    from buoy._backends.lifting import lift
    from buoy._core.codec import decode, encode, register
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
    from buoy._core.ops import Ops, ops_of
    from buoy._core.policies.backoff import Backoff
    from buoy._core.policies.headroom import Headroom
    from buoy._core.policies.importers import Imported, import_state
    from buoy._core.policies.lognormal import LogNormal
    from buoy._core.policies.loss_ahead import LossAhead
    from buoy._core.policies.policy import Bounds, Policy
    from buoy._core.policies.registry import policies, policy
    from buoy._core.policies.static import NoScaling, Static
    from buoy._core.replay.compare import Replayed, oracle, replay
    from buoy._core.replay.trace import Histogram, Trace
    from buoy._core.replay.tune import Tuned, tune
    from buoy._core.state import Seen
    from buoy._core.step import Row
    from buoy._core.verdicts import Verdict

__all__ = [
    "FORMATS",
    "Backoff",
    "Bounds",
    "BuoyError",
    "CallOrderError",
    "Format",
    "Headroom",
    "Histogram",
    "Imported",
    "LogNormal",
    "LossAhead",
    "MissingBackendError",
    "NoScaling",
    "Ops",
    "Policy",
    "PolicyError",
    "Replayed",
    "Row",
    "ScaleCollapsedError",
    "Seen",
    "StateVersionError",
    "Static",
    "Trace",
    "TraceError",
    "Tuned",
    "UnknownPolicyError",
    "Verdict",
    "decode",
    "encode",
    "import_state",
    "lift",
    "number_format",
    "ops_of",
    "oracle",
    "policies",
    "policy",
    "register",
    "replay",
    "trace",
    "tune",
]

_HOMES = {
    "_core.policies.backoff": "Backoff",
    "_backends.lifting": "lift",
    "_core.codec": "decode encode register",
    "_core.errors": (
        "BuoyError CallOrderError MissingBackendError PolicyError ScaleCollapsedError "
        "StateVersionError TraceError UnknownPolicyError"
    ),
    "_core.formats": "FORMATS Format number_format",
    "_core.policies.headroom": "Headroom",
    "_core.policies.importers": "Imported import_state",
    "_core.policies.lognormal": "LogNormal",
    "_core.policies.loss_ahead": "LossAhead",
    "_core.ops": "Ops ops_of",
    "_core.policies.policy": "Bounds Policy",
    "_core.policies.registry": "policies policy",
    "_core.replay.compare": "Replayed oracle replay",
    "_core.state": "Seen",
    "_core.step": "Row",
    "_core.verdicts": "Verdict",
    "_core.policies.static": "NoScaling Static",
    "_core.replay.trace": "Histogram Trace",
    "_core.replay.tune": "Tuned tune",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use."""
    if name in _HOME_OF:
        value = getattr(import_module(f"buoy.{_HOME_OF[name]}"), name)
    elif name == "trace":
        value = import_module("buoy.trace")
    else:
        raise AttributeError(f"module 'buoy' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
