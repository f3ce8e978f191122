"""What a policy is, and what it may assume.

A policy is a frozen dataclass: its fields are the configuration, `init` makes the
first state, `update` is the pure rule from one state to the next, and `foresee` may
lower the scale of the very step whose loss it is shown.  The contract suite in
`buoy.testing` checks all of what is said here.
"""

from typing import Any, Protocol, runtime_checkable

from buoy._core.ops import Ops, Precision, Scalar
from buoy._core.state import Seen

__all__ = ["Policy", "State"]


class State(Protocol):
    """What survives a step: a frozen dataclass of scalars, one of them the scale."""

    @property
    def scale(self) -> Scalar:
        """The multiplier for the next loss."""


@runtime_checkable
class Policy(Protocol):
    """The frozen configuration plus the pure rule that moves the scale.

    `wants` names what the rule reads beyond `finite`: of "amax_log2", "underflow" and
    "loss"; front ends measure nothing else.  `precision` is the width of the state's
    floats on array backends.

    A rule may not branch on numbers (they may be tracers), read them on the host,
    or keep anything outside the state it returns.
    """

    @property
    def wants(self) -> frozenset[str]:
        """What the rule reads beyond `finite`."""

    @property
    def precision(self) -> Precision:
        """The width of the state's floats: float32 wherever that is enough."""

    def init(self) -> Any:
        """Make the state before the first step, of plain numbers."""

    def foresee(self, state: Any, loss: Scalar, *, ops: Ops | None = None) -> Any:
        """Look at this step's loss before it is scaled; may lower the scale."""

    def update(self, state: Any, seen: Seen, *, ops: Ops | None = None) -> Any:
        """Take what this step's gradients showed; return the state for the next."""

    def applies(self, seen: Seen) -> Scalar:
        """Say whether the step is applied; a policy that checks returns `finite`."""
