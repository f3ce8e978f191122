"""Find the module that overflows, gradients that underflow, mistakes in a script.

Importing this module imports no framework; functions that need PyTorch import it when
they are called.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from buoy.diagnose.attribute import first_nonfinite
    from buoy.diagnose.culprit import Culprit
    from buoy.diagnose.doctor import Doctor, Examined, Finding, examine
    from buoy.diagnose.estimate import estimate_run, estimate_underflow
    from buoy.diagnose.rehearse import rng_state
    from buoy.diagnose.save import SavedBatch, load_batch, save_batch
    from buoy.diagnose.shares import Share, Underflow
    from buoy.diagnose.skips import ExplainSkips

__all__ = [
    "Culprit",
    "Doctor",
    "Examined",
    "ExplainSkips",
    "Finding",
    "SavedBatch",
    "Share",
    "Underflow",
    "estimate_run",
    "estimate_underflow",
    "examine",
    "first_nonfinite",
    "load_batch",
    "rng_state",
    "save_batch",
]

_HOMES = {
    "attribute": "first_nonfinite",
    "culprit": "Culprit",
    "doctor": "Doctor Examined Finding examine",
    "estimate": "estimate_run estimate_underflow",
    "rehearse": "rng_state",
    "save": "SavedBatch load_batch save_batch",
    "shares": "Share Underflow",
    "skips": "ExplainSkips",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'buoy.diagnose' has no attribute {name!r}")
    value = getattr(import_module(f"buoy.diagnose.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
