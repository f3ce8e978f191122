"""The rule of `torch.amp.GradScaler`, bit for bit as its kernel computes it."""

from dataclasses import dataclass, field

from buoy._core.formats import FLOAT32_MAX, FLOAT32_TINY
from buoy._core.ops import Ops, Precision, Scalar, ops_of, single
from buoy._core.policies.policy import MIN_SCALE, Bounds
from buoy._core.policies.start import bounded
from buoy._core.state import Seen

__all__ = ["TorchRule", "TorchRuleState"]


@dataclass(frozen=True, slots=True)
class TorchRuleState:
    """The two tensors of torch's scaler, `_scale` and `_growth_tracker`."""

    scale: Scalar  # float32 []
    clean_steps: Scalar  # int32 []: finite steps since the last overflow or growth


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchRule:
    """Halve the scale on overflow; double it after 2000 finite steps in a row.

    The rule, which is that of `torch._amp_update_scale_`::

        overflow: clean = 0;   scale *= backoff_factor       (the step is skipped)
        finite:   clean += 1
                  if clean == growth_interval:
                      clean = 0
                      scale *= growth_factor, unless that is not finite

    A product is computed in float64 and rounded to float32.  Bug of the peer: without a
    floor the scale reaches 0, and 1 / 0 then writes NaN into the weights.

    Settings are not checked here: torch's scaler accepts any, also while it trains.

    Example:
        >>> policy = TorchRule(init_scale=16.0, growth_interval=2)
        >>> state = policy.init()
        >>> for finite in (True, True, False):
        ...     state = policy.update(state, Seen(finite=finite))
        ...     print(state)
        TorchRuleState(scale=16.0, clean_steps=1)
        TorchRuleState(scale=32.0, clean_steps=0)
        TorchRuleState(scale=16.0, clean_steps=0)
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 0.0  # torch has no bounds: our scaler adds them
    max_scale: float = FLOAT32_MAX
    # Whether to multiply in float64: otherwise float32 gives the same, also in JAX.
    wide: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        factors = (self.growth_factor, self.backoff_factor)
        wide = any(single(factor) != factor for factor in factors)
        object.__setattr__(self, "wide", wide)

    @property
    def bounds(self) -> Bounds:
        """Those given; without a floor, front ends keep the scale above 2^-24."""
        return Bounds(self.min_scale or MIN_SCALE, self.max_scale, peer=True)

    @property
    def wants(self) -> frozenset[str]:
        """Nothing, because this rule uses only `finite`."""
        return frozenset()

    @property
    def precision(self) -> Precision:
        """float32, as the scale itself."""
        return "float32"

    def init(self, *, scale: Scalar = None) -> TorchRuleState:
        """Start at `init_scale` or at `scale`; count from 0."""
        start = self.init_scale if scale is None else scale
        start = bounded(start, FLOAT32_TINY, FLOAT32_MAX, self.precision)
        return TorchRuleState(scale=start, clean_steps=0)

    def foresee(
        self, state: TorchRuleState, loss: Scalar, *, ops: Ops | None = None
    ) -> TorchRuleState:
        """Return the state unchanged: this rule does not use the loss."""
        del loss, ops
        return state

    def update(
        self, state: TorchRuleState, seen: Seen, *, ops: Ops | None = None
    ) -> TorchRuleState:
        """Return the next state.  Traceable: no branch on numbers, no host read."""
        if ops is None:
            ops = ops_of(seen.finite, state.scale)
        where = ops.where
        clean = where(seen.finite, state.clean_steps + 1, 0)
        grows = clean == self.growth_interval
        start = state.scale
        if self.wide:
            start = ops.cast(start, "float64")
        down = ops.cast(start * self.backoff_factor, "float32")
        up = ops.cast(start * self.growth_factor, "float32")
        up = where(up <= FLOAT32_MAX, up, state.scale)
        scale = where(grows, up, state.scale)
        scale = where(seen.finite, scale, down)
        if self.min_scale > 0.0:
            scale = where(scale < self.min_scale, self.min_scale, scale)
        if self.max_scale < FLOAT32_MAX:
            scale = where(scale > self.max_scale, self.max_scale, scale)
        return TorchRuleState(
            scale=scale,
            clean_steps=where(grows, 0, clean),
        )
