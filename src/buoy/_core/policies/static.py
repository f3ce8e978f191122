"""Scales that do not move: a fixed one, and none at all."""

from dataclasses import dataclass

from buoy._core.checks import boolean, number
from buoy._core.formats import FLOAT32_MAX, FLOAT32_TINY
from buoy._core.ops import Ops, Precision, Scalar, know_backends
from buoy._core.state import Seen

__all__ = ["NoScaling", "Static", "StaticState"]


@dataclass(frozen=True, slots=True)
class StaticState:
    """The scale, which stays."""

    scale: Scalar  # float32 []


class _Still:
    """What both share: nothing is measured, and nothing moves."""

    __slots__ = ()

    @property
    def wants(self) -> frozenset[str]:
        """Nothing: the scale does not move."""
        return frozenset()

    @property
    def precision(self) -> Precision:
        """float32 is enough for one number."""
        return "float32"

    def foresee(
        self, state: StaticState, loss: Scalar, *, ops: Ops | None = None
    ) -> StaticState:
        """Look away: the scale does not depend on the loss."""
        del loss, ops
        return state

    def update(
        self, state: StaticState, seen: Seen, *, ops: Ops | None = None
    ) -> StaticState:
        """Return the state as it was."""
        del seen, ops
        return state


@dataclass(frozen=True, slots=True, kw_only=True)
class Static(_Still):
    """Keep one scale for ever; skip the steps that overflow.

    Find a good value with `buoy tune`.

    Example:
        >>> policy = Static(init_scale=128.0)
        >>> state = policy.update(policy.init(), Seen(finite=False))
        >>> state.scale, policy.applies(Seen(finite=False))
        (128.0, False)
    """

    init_scale: float = 2.0**10
    skip: bool = True  # False applies whatever comes, as apex and Keras 2 do

    def __post_init__(self) -> None:
        number(self, "init_scale", least=FLOAT32_TINY, most=FLOAT32_MAX)
        boolean(self, "skip")

    def init(self) -> StaticState:
        """Start at the scale that will stay."""
        know_backends()
        return StaticState(scale=float(self.init_scale))

    def applies(self, seen: Seen) -> Scalar:
        """Apply finite steps, or all of them where skipping is off."""
        return seen.finite if self.skip else (seen.finite | True)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoScaling(_Still):
    """Scale by 1: for BF16 and FP32, so that a training loop needs no `if`.

    Non-finite steps are still skipped.

    Example:
        >>> NoScaling().init().scale
        1.0
    """

    def init(self) -> StaticState:
        """Start at 1 and stay there."""
        know_backends()
        return StaticState(scale=1.0)

    def applies(self, seen: Seen) -> Scalar:
        """Apply finite steps only."""
        return seen.finite
