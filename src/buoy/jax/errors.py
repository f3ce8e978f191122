"""What the JAX front end raises.  Each class is also the builtin one would expect."""

from buoy._core.errors import (
    BuoyError,
    BuoyWarning,
    CallOrderError,
    OptionError,
    PolicyError,
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
    "UnboundAxisError",
    "UnhashablePolicyError",
]


class NoScaleError(BuoyError, LookupError):
    """No state of `loss_scaled` is where one was looked for."""


class NoStepError(CallOrderError):
    """A step was asked about before there was one."""


class SeveralScalesError(BuoyError, LookupError):
    """More than one state of `loss_scaled` was found, and one had to be meant."""


class StructureError(BuoyError, ValueError):
    """Gradients, parameters and state are not of one tree."""


class IntegerLeafError(BuoyError, TypeError):
    """A leaf that should be a float is an integer, a boolean or no array."""


class LossError(BuoyError, TypeError):
    """A loss function returned something else than one loss, or a loss and data."""


class MissingAxisError(BuoyError, ValueError):
    """Devices would decide apart: no `axis_name` says over which axis to agree."""


class UnboundAxisError(BuoyError, NameError):
    """`axis_name` names an axis that does not exist where it was used."""


class UnhashablePolicyError(PolicyError, TypeError):
    """A policy cannot be part of a compiled function: a field has no hash."""
