"""Scales that do not move: a fixed one, and none at all."""

from dataclasses import dataclass

from buoy._core.checks import number
from buoy._core.formats import FLOAT32_MAX, FLOAT32_TINY
from buoy._core.ops import PLAIN, Ops, Precision, Scalar, ops_of, register_backends
from buoy._core.policies.policy import MIN_SCALE, Bounds
from buoy._core.policies.start import bounded
from buoy._core.state import Seen

__all__ = ["NoScaling", "Static", "StaticState"]


@dataclass(frozen=True, slots=True)
class StaticState:
    """The constant scale."""

    scale: Scalar  # float32 []


class _Still:
    """Base class: nothing is measured, and the scale is constant."""

    __slots__ = ()

    @property
    def wants(self) -> frozenset[str]:
        """Nothing, because the scale does not change."""
        return frozenset()

    @property
    def precision(self) -> Precision:
        """float32 is enough for one number."""
        return "float32"

    def foresee(
        self, state: StaticState, loss: Scalar, *, ops: Ops | None = None
    ) -> StaticState:
        """Return the state unchanged: the scale does not depend on the loss."""
        del loss, ops
        return state

    def update(
        self, state: StaticState, seen: Seen, *, ops: Ops | None = None
    ) -> StaticState:
        """Return the state unchanged."""
        del seen, ops
        return state


@dataclass(frozen=True, slots=True, kw_only=True)
class Static(_Still):
    """Keep one scale; skip the steps that overflow.

    Find a good value with `buoy tune`.

    Example:
        >>> policy = Static(init_scale=128.0)
        >>> state = policy.update(policy.init(), Seen(finite=False))
        >>> state.scale
        128.0
    """

    init_scale: float = 2.0**10

    def __post_init__(self) -> None:
        number(self, "init_scale", least=FLOAT32_TINY, most=FLOAT32_MAX)

    @property
    def bounds(self) -> Bounds:
        """Every scale that can be set, from 2^-24 or `init_scale` on."""
        return Bounds(low=min(MIN_SCALE, self.init_scale))

    def init(self, *, scale: Scalar = None) -> StaticState:
        """Start at the scale that will stay: `init_scale`, or `scale` if given."""
        start = self.init_scale if scale is None else scale
        # A plain number is not rounded; float32 applies on the device.
        width: Precision = "float64" if ops_of(start) is PLAIN else "float32"
        return StaticState(scale=bounded(start, FLOAT32_TINY, FLOAT32_MAX, width))


@dataclass(frozen=True, slots=True, kw_only=True)
class NoScaling(_Still):
    """Keep the scale at 1: for BF16 and FP32, so that a training loop needs no `if`.

    Non-finite steps are still skipped.

    Example:
        >>> NoScaling().init().scale
        1.0
    """

    @property
    def bounds(self) -> Bounds:
        """1 and nothing else."""
        return Bounds(1.0, 1.0)

    def init(self, *, scale: Scalar = None) -> StaticState:
        """Start at 1; `scale` is ignored."""
        del scale
        register_backends()
        return StaticState(scale=1.0)
