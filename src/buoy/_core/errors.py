"""The tree of errors.

    BuoyError
    +-- PolicyError (ValueError)            a policy's configuration cannot work
    +-- UnknownPolicyError (LookupError)    no policy of that name is installed
    +-- StateVersionError (ValueError)      a saved state or policy cannot be read
    +-- TraceError (ValueError)             a trace file cannot be read
    +-- MissingBackendError (ImportError)   a framework or an extra is not installed
    +-- CallOrderError (RuntimeError)       methods came in the wrong order
    +-- ScaleCollapsedError (ArithmeticError)  the scale cannot fall any further
    |   +-- StuckError                      step after step, training does not move
    +-- OptionError (ValueError)            a front end's option cannot be that

Each is also the builtin that a caller would expect, and each message says what was
wrong with which value, what is accepted, and what to do.
"""

from typing import Any

__all__ = [
    "BuoyError",
    "BuoyWarning",
    "CallOrderError",
    "MissingBackendError",
    "OptionError",
    "PolicyError",
    "ScaleCollapsedError",
    "StateVersionError",
    "StuckError",
    "StuckWarning",
    "TraceError",
    "UnknownPolicyError",
]


class BuoyError(Exception):
    """The root of everything that Buoy raises on purpose."""


class BuoyWarning(UserWarning):
    """Something is probably wrong, and training can go on; said once."""


class StuckWarning(BuoyWarning):
    """Training does not move: step after step is skipped, or has zero gradients."""


class PolicyError(BuoyError, ValueError):
    """A policy was configured with a value that it cannot work with."""


class UnknownPolicyError(BuoyError, LookupError):
    """No policy of that name is built in or installed."""


class StateVersionError(BuoyError, ValueError):
    """A saved state or policy is of a version or shape that we cannot read."""


class TraceError(BuoyError, ValueError):
    """A trace file is damaged, foreign, or lacks what was asked of it."""


class MissingBackendError(BuoyError, ImportError):
    """A framework or an optional dependency is not installed."""


class CallOrderError(BuoyError, RuntimeError):
    """A front end's methods were called in an order that cannot be right."""


class OptionError(BuoyError, ValueError):
    """An option has a value that is not among those accepted."""


class ScaleCollapsedError(BuoyError, ArithmeticError):
    """The scale would have to fall below the level at which its policy gives up.

    `state` is the state to go on from: nothing is lost by catching this.
    """

    def __init__(self, message: str, state: Any = None) -> None:
        super().__init__(message)
        self.state = state


class StuckError(ScaleCollapsedError):
    """Training does not move; `verdict` says why the last step was skipped."""

    def __init__(self, message: str, verdict: object = None) -> None:
        super().__init__(message)
        self.verdict = verdict
