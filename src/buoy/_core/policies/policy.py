"""The protocol of policies.

A policy is a frozen dataclass: its fields are the configuration, `init` returns the
initial state, `update` is the pure rule from one state to the next, and `foresee` may
lower the scale of the step whose loss it gets.  `buoy.testing.check_policy` checks
everything stated here.
"""

from typing import Any, Protocol, runtime_checkable

from buoy._core.ops import Ops, Precision, Scalar
from buoy._core.state import Seen

__all__ = ["Policy", "State", "finite_only", "unwrapped"]


class State(Protocol):
    """The state of a policy: a frozen dataclass of scalars, one of them the scale."""

    @property
    def scale(self) -> Scalar:
        """The multiplier for the next loss."""


@runtime_checkable
class Policy(Protocol):
    """A policy: frozen settings, and a pure rule that sets the scale.

    `wants` names what the rule reads beyond `finite`: "amax_log2", "underflow",
    "loss_finite", and "loss" (passed to `foresee`); with "sparse", steps that clip may
    leave out "amax_log2", two of three times;
    front ends provide only that.  `precision` is the dtype of the state's floats on
    array backends.

    A rule must not branch on numbers (they may be tracers), read them on the host,
    or keep anything outside the state it returns.
    """

    @property
    def wants(self) -> frozenset[str]:
        """What the rule reads beyond `finite`."""

    @property
    def precision(self) -> Precision:
        """The dtype of the state's floats; float32 if that is enough."""

    def init(self) -> Any:
        """Return the state before the first step, of plain numbers.

        May take an optional keyword `scale`, None by default: start there, within the
        policy's bounds.  It is a plain number, or a scalar of an array backend, which
        must not be read: compute what depends on it with `ops_of`; the rest stays
        plain.  Policies without it are started by
        `dataclasses.replace(policy, init_scale=...)`, from plain numbers only.
        """

    def foresee(self, state: Any, loss: Scalar, *, ops: Ops | None = None) -> Any:
        """Take this step's loss before it is scaled; may lower the scale."""

    def update(self, state: Any, seen: Seen, *, ops: Ops | None = None) -> Any:
        """Return the state for the next step, from the findings of this step."""

    def applies(self, seen: Seen) -> Scalar:
        """Return whether to apply the step; usually `seen.finite`."""


def unwrapped(policy: Any) -> Any:
    """Return the policy inside a wrapper such as `LossAhead`, or the policy itself."""
    while hasattr(policy, "policy"):
        policy = policy.policy
    return policy


def finite_only(policy: Any, seen: Seen) -> Scalar:
    """Apply finite steps only: what most policies have for `applies`."""
    del policy
    return seen.finite
