"""The exceptions of the JAX front end.  Each is also the builtin to expect."""

from buoy._core.errors import (
    BuoyError,
    BuoyWarning,
    CallOrderError,
    OptionError,
    PolicyError,
    StuckError,
    StuckWarning,
)

__all__ = [
    "BuoyWarning",
    "IntegerLeafError",
    "LossError",
    "MissingAxisError",
    "NoScaleError",
    "NoStepError",
    "OptionError",
    "SeveralScalesError",
    "StructureError",
    "StuckError",
    "StuckWarning",
    "UnboundAxisError",
    "UnhashablePolicyError",
]


class NoScaleError(BuoyError, LookupError):
    """No state of `loss_scaled` was found."""


class NoStepError(CallOrderError):
    """The last step was requested before the first step."""


class SeveralScalesError(BuoyError, LookupError):
    """More than one state of `loss_scaled` was found where one is needed."""


class StructureError(BuoyError, ValueError):
    """Gradients, parameters and state do not have the same tree structure."""


class IntegerLeafError(BuoyError, TypeError):
    """A leaf that should be a float is an integer, a boolean or not an array."""


class LossError(BuoyError, TypeError):
    """A loss function did not return one loss, or a loss and data."""


class MissingAxisError(BuoyError, ValueError):
    """Devices would decide independently: `axis_name` is missing."""


class UnboundAxisError(BuoyError, NameError):
    """`axis_name` names an axis that does not exist where it was used."""


class UnhashablePolicyError(PolicyError, TypeError):
    """A policy cannot be part of a compiled function: a field is not hashable."""
