"""The exception hierarchy.

    BuoyError
    +-- PolicyError (ValueError)            a policy's configuration cannot work
    +-- UnknownPolicyError (LookupError)    no policy of that name is installed
    +-- StateVersionError (ValueError)      a saved state or policy cannot be read
    +-- TraceError (ValueError)             a trace file cannot be read
    +-- MissingBackendError (ImportError)   a framework or an extra is not installed
    +-- CallOrderError (RuntimeError)       methods called in the wrong order
    +-- ScaleCollapsedError (ArithmeticError)  the scale cannot fall any further
    |   +-- StuckError                      training makes no progress
    +-- OptionError (ValueError, ...)       an argument cannot be used
    +-- DeviceModeError (RuntimeError)      the outcome must be known on the host
    +-- RankMismatchError (RuntimeError)    ranks differ; `held` has their values
    +-- AbsentRankError (RuntimeError)      ranks did not take part; `absent` lists them

Each is also the builtin that a caller would expect, and each message says what was
wrong with which value, what is accepted, and what to do.
"""

from collections.abc import Mapping
from typing import Any

__all__ = [
    "AbsentRankError",
    "BuoyError",
    "BuoyWarning",
    "CallOrderError",
    "DeviceModeError",
    "MissingBackendError",
    "OptionError",
    "PolicyError",
    "RankMismatchError",
    "ScaleCollapsedError",
    "StateVersionError",
    "StuckError",
    "StuckWarning",
    "TraceError",
    "UnknownPolicyError",
]


class BuoyError(Exception):
    """The base class of all exceptions that Buoy raises."""


class BuoyWarning(UserWarning):
    """Something is probably wrong, but training can continue; issued once."""


class StuckWarning(BuoyWarning):
    """Training makes no progress: steps are skipped, or gradients are zero."""


class PolicyError(BuoyError, ValueError):
    """A policy has an invalid setting, or returned an invalid scale."""


class UnknownPolicyError(BuoyError, LookupError):
    """No policy of that name is built in or installed."""


class StateVersionError(BuoyError, ValueError):
    """A saved state or policy has a version or form that cannot be read."""


class TraceError(BuoyError, ValueError):
    """A trace file is damaged, not a trace, or lacks what was requested."""


class MissingBackendError(BuoyError, ImportError):
    """A framework or an optional dependency is not installed."""


class CallOrderError(BuoyError, RuntimeError, AssertionError):
    """Calls are missing, repeated or in the wrong order: change the loop.

    It is also a RuntimeError and an AssertionError, which torch raises in such cases.
    """


class OptionError(BuoyError, ValueError, TypeError, AssertionError, AttributeError):
    """An argument cannot be used: pass another one.

    It is also each of the four builtins that frameworks raise in such cases.
    """


class ScaleCollapsedError(BuoyError, ArithmeticError):
    """The scale reached the minimum at which its policy stops the run.

    `state` is the state to continue from after catching this.
    """

    def __init__(self, message: str, state: Any = None) -> None:
        super().__init__(message)
        self.state = state


class StuckError(ScaleCollapsedError):
    """Training makes no progress; `verdict` is the reason for the last skip."""

    def __init__(self, message: str, verdict: object = None) -> None:
        super().__init__(message)
        self.verdict = verdict


class DeviceModeError(BuoyError, RuntimeError):
    """The outcome must be known on the host: use `sync="auto"` and an eager step."""


class AbsentRankError(BuoyError, RuntimeError):
    """Ranks did not take part in a step; `absent` lists them, if known."""

    def __init__(self, message: str, absent: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.absent = absent


class RankMismatchError(BuoyError, RuntimeError):
    """Ranks differ in scales, gradients or calls; `held` maps ranks to values."""

    def __init__(
        self, message: str, held: Mapping[int, tuple[float, ...]] | None = None
    ) -> None:
        super().__init__(message)
        self.held = dict(held or {})
