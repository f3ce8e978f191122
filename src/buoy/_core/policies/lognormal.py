"""Place the scale by the statistics of the largest gradient (OpenSeq2Seq's LogMax).

log2 of the largest unscaled gradient is assumed to be normally distributed; the scale
is set so that an overflow is `deviations` standard deviations away.  The published rule
has two bugs, which the preset `openseq2seq_logmax` reproduces; the defaults do not.
"""

from dataclasses import dataclass, field
from math import log

from buoy._core.checks import boolean, number, ordered
from buoy._core.ops import PLAIN, Ops, Precision, Scalar, ops_of, single
from buoy._core.policies.policy import MIN_SCALE, Bounds
from buoy._core.policies.start import bounded
from buoy._core.state import Seen

__all__ = ["LogNormal", "LogNormalState"]

_LOG2_E = single(1.0 / single(log(2.0)))
_CUBIC = tuple(  # 2^r - 1 for |r| <= 1/64, highest power first
    float.fromhex(c)
    for c in ("0x1.c6af84b912394p-5", "0x1.ebfce50fac4f3p-3", "0x1.62e42ff0c52d6p-1")
)


@dataclass(frozen=True, slots=True)
class LogNormalState:
    """The scale and the running moments.  float64 that holds float32 values."""

    scale: Scalar
    mean: Scalar  # of log2 amax, fast decay, biased
    slow_mean: Scalar  # the same with the decay of the square
    square: Scalar  # of log2 amax squared, biased
    mean_weight: Scalar  # the weight of the initial value in `mean`
    square_weight: Scalar


@dataclass(frozen=True, slots=True)
class _Constants:
    """The configuration in float32, rounded once and not at each step."""

    fast: float
    fast_rest: float
    slow: float
    slow_rest: float
    deviations: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """Set the scale so that an overflow is `deviations` standard deviations away.

    The rule, with a = log2 of the largest unscaled gradient of this step::

        mu    = running mean of a                  (mean_decay, bias corrected)
        sigma = running deviation of a             (variance_decay, bias corrected)
        scale = 2^(max_log2 - mu - deviations * sigma), within the bounds
        overflow: a = overflow_log2, or what it implies: max_log2 + 1 - log2(scale)
        a loss that was not finite before it was scaled: nothing changes

    Every operation is computed in float64 and rounded to float32: JAX needs
    `jax_enable_x64`.

    Example:
        >>> policy = LogNormal(deviations=0.0)
        >>> policy.update(policy.init(), Seen(finite=True, amax_log2=2.0)).scale
        4194320.5
    """

    init_scale: float = 2.0**8
    min_scale: float = 2.0**-24
    max_scale: float = 2.0**24
    mean_decay: float = 0.99
    variance_decay: float = 0.999
    deviations: float = 3.09
    max_log2: float = 16.0
    overflow_log2: float | None = None
    skip_zero: bool = True  # ignore a step whose gradients are all 0
    constants: _Constants = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        number(self, "init_scale", above=0.0)
        number(self, "min_scale", above=0.0)
        number(self, "max_scale", above=0.0)
        ordered(self, "min_scale", "max_scale")
        number(self, "init_scale", least=self.min_scale, most=self.max_scale)
        number(self, "mean_decay", above=0.0, below=1.0)
        number(self, "variance_decay", above=0.0, below=1.0)
        number(self, "deviations", least=0.0)
        number(self, "max_log2")
        number(self, "overflow_log2", optional=True)
        boolean(self, "skip_zero")
        object.__setattr__(self, "constants", self._rounded())

    def _rounded(self) -> _Constants:
        return _Constants(
            fast=single(self.mean_decay),
            fast_rest=single(1.0 - self.mean_decay),
            slow=single(self.variance_decay),
            slow_rest=single(1.0 - self.variance_decay),
            deviations=single(self.deviations),
            low=single(self.min_scale),
            high=single(self.max_scale),
        )

    @property
    def bounds(self) -> Bounds:
        """From `min_scale` to `max_scale`, as float32 holds them.

        The published rule, whose scale is NaN after zeros, leaves them like other
        peers do.
        """
        if not self.skip_zero:
            return Bounds(min(self.min_scale, MIN_SCALE), peer=True)
        return Bounds(self.constants.low, self.constants.high)

    @property
    def wants(self) -> frozenset[str]:
        """The size of the gradients, and whether the loss failed."""
        if not self.skip_zero:
            return frozenset({"amax_log2"})
        return frozenset({"amax_log2", "loss_finite"})

    @property
    def precision(self) -> Precision:
        """float64, so that no fused operation can skip a rounding."""
        return "float64"

    def init(self, *, scale: Scalar = None) -> LogNormalState:
        """Start at `init_scale`, or at `scale` within the bounds."""
        start = self.init_scale if scale is None else scale
        start = bounded(start, self.constants.low, self.constants.high, "float32")
        return LogNormalState(
            scale=ops_of(start).cast(start, "float64"),
            mean=0.0,
            slow_mean=0.0,
            square=0.0,
            mean_weight=1.0,
            square_weight=1.0,
        )

    def foresee(
        self, state: LogNormalState, loss: Scalar, *, ops: Ops | None = None
    ) -> LogNormalState:
        """Return the state unchanged: this rule does not use the loss."""
        del loss, ops
        return state

    def update(
        self, state: LogNormalState, seen: Seen, *, ops: Ops | None = None
    ) -> LogNormalState:
        """Update the moments with this step's largest gradient; set the scale."""
        if ops is None:
            ops = ops_of(seen.finite, state.scale)
        where = ops.where
        known, log2_amax = self._measured(state, seen, ops)
        if seen.loss_finite is not None:
            known = known & seen.loss_finite  # a failed forward pass teaches nothing

        c = self.constants
        share = _times(ops, log2_amax, c.slow_rest)
        after = LogNormalState(
            scale=state.scale,
            mean=_blend(ops, c.fast, state.mean, _times(ops, log2_amax, c.fast_rest)),
            slow_mean=_blend(ops, c.slow, state.slow_mean, share),
            square=_blend(ops, c.slow, state.square, _times(ops, share, log2_amax)),
            mean_weight=_times(ops, state.mean_weight, c.fast),
            square_weight=_times(ops, state.square_weight, c.slow),
        )
        placed = self._placed(after, ops)
        if self.overflow_log2 is None:
            half = state.scale * 0.5
            half = where(half < c.low, c.low, half)
            placed = where(seen.finite, placed, where(placed < half, placed, half))
        return LogNormalState(
            scale=where(known, placed, state.scale),
            mean=where(known, after.mean, state.mean),
            slow_mean=where(known, after.slow_mean, state.slow_mean),
            square=where(known, after.square, state.square),
            mean_weight=where(known, after.mean_weight, state.mean_weight),
            square_weight=where(known, after.square_weight, state.square_weight),
        )

    def _measured(
        self, state: LogNormalState, seen: Seen, ops: Ops
    ) -> tuple[Scalar, Scalar]:
        log2_scale = ops.log2(ops.cast(state.scale, "float64"))
        implied = self.overflow_log2
        if implied is None:
            implied = _round(ops, self.max_log2 + 1.0 - log2_scale)
        if seen.amax_log2 is None:
            return ops.where(seen.finite, False, True), implied
        amax = ops.cast(seen.amax_log2, "float64") - log2_scale
        if not self.skip_zero:
            amax = ops.where(seen.finite, _published_log2(ops, amax), implied)
            return ops.where(seen.finite, True, True), amax
        measured = (amax > -1e4) & (amax < 1e4)
        amax = ops.where(measured, amax, 0.0)
        amax = ops.where(seen.finite, _round(ops, amax), implied)
        return ops.where(seen.finite, measured, True), amax

    def _placed(self, state: LogNormalState, ops: Ops) -> Scalar:
        where = ops.where
        mean = _round(ops, state.mean / _round(ops, 1.0 - state.mean_weight))
        weight = _round(ops, 1.0 - state.square_weight)
        square = _round(ops, state.square / weight)
        slow_mean = _round(ops, state.slow_mean / weight)
        variance = _round(ops, square - _times(ops, slow_mean, slow_mean))
        # Not `> 0`: the published rule propagates NaN, and so must the preset.
        variance = where(variance < 0.0, 0.0, variance)
        spread = _times(ops, _round(ops, variance**0.5), self.constants.deviations)
        exponent = _round(ops, _round(ops, self.max_log2 - mean) - spread)
        scale = _round(ops, _exp2(ops, exponent))
        low = self.constants.low
        high = self.constants.high
        scale = where(scale > high, high, scale)
        return where(scale < low, low, scale)


def _round(ops: Ops, x: Scalar) -> Scalar:
    """Round to float32, but stay in float64: no fused operation can skip it."""
    if ops is PLAIN:  # the same number, at a third of the cost
        return single(x)
    return ops.cast(ops.cast(x, "float32"), "float64")


def _times(ops: Ops, x: Scalar, y: Scalar) -> Scalar:
    return _round(ops, x * y)


def _published_log2(ops: Ops, amax_log2: Scalar) -> Scalar:
    """Take the logarithm as published: float32 ln, times float32 log2 e."""
    amax = _round(ops, ops.exp2(amax_log2))
    return _times(ops, _round(ops, ops.log2(amax) * log(2.0)), _LOG2_E)


def _exp2(ops: Ops, x: Scalar) -> Scalar:
    """Raise 2 to x as float32 libraries do: a cubic around multiples of 1/32.

    Its error, half a thousandth of a float32 ulp, decides the rounding if the exact
    value is next to a tie, which occurs in the recorded traces.
    """
    near = ops.floor(x * 32.0 + 0.5) / 32.0
    r = x - near
    low = _CUBIC[0] * r + _CUBIC[1]
    high = _CUBIC[2] * r + 1.0
    return (low * (r * r) + high) * ops.exp2(near)


def _blend(ops: Ops, decay: float, old: Scalar, share: Scalar) -> Scalar:
    return _round(ops, _times(ops, old, decay) + share)
