"""The protocol of policies.

A policy is a frozen dataclass: its fields are the configuration, `init` returns the
initial state, `update` is the pure rule from one state to the next, and `foresee` may
lower the scale of the step whose loss it gets.  `buoy.testing.check_policy` checks
everything stated here.
"""

import inspect
from typing import Any, NamedTuple, Protocol, runtime_checkable

from buoy._core.formats import FLOAT32_MAX
from buoy._core.ops import Ops, Precision, Scalar
from buoy._core.state import Seen, State

__all__ = ["MIN_SCALE", "Bounds", "Policy", "lacks"]

MIN_SCALE = 2.0**-24  # the floor of policies that have none


class Bounds(NamedTuple):
    """The lowest and the highest scale of a policy.

    Example:
        >>> Bounds(high=2.0**15)
        Bounds(low=5.960464477539063e-08, high=32768.0, peer=False)
    """

    low: float = MIN_SCALE
    high: float = FLOAT32_MAX
    peer: bool = False  # reproduces an existing scaler, with its faults: no errors


@runtime_checkable
class Policy(Protocol):
    """A policy: frozen settings, and a pure rule that sets the scale.

    A rule must not branch on numbers (they may be tracers), read them on the host,
    or keep anything outside the state it returns.
    """

    @property
    def bounds(self) -> Bounds:
        """The lowest and the highest scale, which front ends keep to."""

    @property
    def wants(self) -> frozenset[str]:
        """What the rule reads beyond `finite`; front ends provide only that.

        "amax_log2", "underflow", "loss_finite", and "loss" (passed to `foresee`).
        With "sparse", steps that clip may leave out "amax_log2", two of three times.
        """

    @property
    def precision(self) -> Precision:
        """The dtype of the state's floats on array backends; float32 if enough."""

    def init(self, *, scale: Scalar = None) -> State:
        """Return the state before the first step, of plain numbers.

        With `scale`, start there, within the policy's bounds.  It is a plain number,
        or a scalar of an array backend, which must not be read: compute what depends
        on it with `ops_of`; the rest stays plain.
        """

    def foresee(self, state: State, loss: Scalar, *, ops: Ops | None = None) -> State:
        """Take this step's loss before it is scaled; may lower the scale."""

    def update(self, state: State, seen: Seen, *, ops: Ops | None = None) -> State:
        """Return the state for the next step, from the findings of this step."""


_MEMBERS = {  # an example of each member, for error messages
    "bounds": "bounds = buoy.Bounds(low=2.0**-24, high=2.0**15)",
    "wants": "wants = frozenset()",
    "precision": 'precision = "float32"',
    "init": "def init(self, *, scale=None)",
    "foresee": "def foresee(self, state, loss, *, ops=None)",
    "update": "def update(self, state, seen, *, ops=None)",
}


def lacks(given: Any) -> str:
    """Return what an object must get to be a policy; "" if it is one.

    Example:
        >>> from buoy import Static
        >>> lacks(Static())
        ''
        >>> lacks(3)[:42]
        'A policy has `bounds`, e.g. `bounds = buoy'
    """
    if isinstance(given, type):
        return f"Make a policy of the class: {given.__name__}(...)."
    missing = [name for name in _MEMBERS if not hasattr(given, name)]
    if not missing and "scale" not in inspect.signature(given.init).parameters:
        missing = ["init"]
    if not missing:
        return ""
    parts = [f"`{name}`, e.g. `{_MEMBERS[name]}`" for name in missing]
    return f"A policy has {'; '.join(parts)}."
