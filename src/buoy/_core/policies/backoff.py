"""The classic rule: grow after enough finite steps, shrink on overflow."""

from dataclasses import InitVar, dataclass, field
from typing import Literal, get_args

from buoy._core.checks import choice, number, ordered, whole
from buoy._core.errors import PolicyError
from buoy._core.formats import FLOAT32_MAX, FLOAT32_TINY
from buoy._core.ops import PLAIN, Ops, Precision, Scalar, ops_of, single
from buoy._core.policies.policy import Bounds
from buoy._core.policies.start import bounded
from buoy._core.state import Seen

__all__ = [
    "Backoff",
    "BackoffState",
    "Constants",
    "check_bounds_and_counts",
    "check_factors",
    "fraction",
    "refills",
    "scale_of_power",
]

Refill = Literal["growth", "clean", "change", "clean_or_change"]

_INIT_SCALE = 2.0**16
_ULP = 2.0**-23  # from 1 to the next float32


@dataclass(frozen=True, slots=True)
class BackoffState:
    """The state of `Backoff`.  Fields that the policy does not use are None."""

    scale: Scalar  # float32 []
    clean_steps: Scalar  # int32 []: finite steps since the last overflow or growth
    budget: Scalar = None  # int32 []: overflows until the scale falls
    steps: Scalar = None  # int32 []: steps since the scale last grew or fell
    overflows: Scalar = None  # int32 []: since the scale last fell; growth keeps them
    # The rest is used only by presets.
    exponent: Scalar = None  # float64 []: log2 of the scale, where growth is a step
    interval: Scalar = None  # float []: the growth interval, where it moves
    pending: Scalar = None  # float []: the scale after next, where changes lag
    settled: Scalar = None  # bool []: whether there was an overflow
    streak: Scalar = None  # int32 []: overflows in a row
    collapsed: Scalar = None  # bool []: the policy gave up at this step


@dataclass(frozen=True, slots=True)
class Constants:
    """The configuration, rounded to float32 once and not at each step."""

    growth: float
    backoff: float
    low: float
    high: float
    share: tuple[int, int]  # the tolerance as a fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Lower the scale on overflow; raise it after `growth_interval` finite steps.

    The rule::

        finite:    clean += 1;  if clean == growth_interval: scale *= growth_factor
        overflow:  clean = 0;   scale *= backoff_factor      (the step is skipped)
        both:      min_scale <= scale <= max_scale

    `hysteresis` is the number of overflows that it takes to lower the scale;
    `hysteresis_refill` says what resets this count: growth, a finite ("clean") step, or
    any change of the scale.  `tolerance`: the scale does not fall while the number of
    overflows since it last fell, divided by the number of steps since it last fell or
    grew, is below this.

    Example:
        >>> policy = Backoff(init_scale_power=4, growth_interval=2)
        >>> state = policy.init()
        >>> for finite in (True, True, False):
        ...     state = policy.update(state, Seen(finite=finite))
        ...     print(state.scale)
        16.0
        32.0
        16.0
    """

    init_scale: float = _INIT_SCALE
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 2.0**-24
    max_scale: float = 2.0**64
    hysteresis: int = 1
    hysteresis_refill: Refill = "growth"
    tolerance: float = 0.0
    constants: Constants = field(init=False, repr=False, compare=False)
    init_scale_power: InitVar[float | None] = None

    def __post_init__(self, init_scale_power: float | None) -> None:
        if init_scale_power is not None:
            start = scale_of_power(init_scale_power, self.init_scale)
            object.__setattr__(self, "init_scale", start)
        check_factors(self)
        check_bounds_and_counts(self)
        number(self, "init_scale", least=self.min_scale, most=self.max_scale)
        constants = Constants(
            growth=single(self.growth_factor),
            backoff=single(self.backoff_factor),
            low=single(self.min_scale),
            high=single(self.max_scale),
            share=fraction(self.tolerance),
        )
        object.__setattr__(self, "constants", constants)

    @property
    def bounds(self) -> Bounds:
        """From `min_scale` to `max_scale`, as float32 holds them."""
        return Bounds(self.constants.low, self.constants.high)

    @property
    def wants(self) -> frozenset[str]:
        """Nothing, because this rule uses only `finite`."""
        return frozenset()

    @property
    def precision(self) -> Precision:
        """float32, as the scale itself."""
        return "float32"

    def init(self, *, scale: Scalar = None) -> BackoffState:
        """Start at `init_scale`, or at `scale` within the bounds; count from 0."""
        tolerant = self.tolerance > 0.0
        start = self.init_scale if scale is None else scale
        return BackoffState(
            scale=bounded(start, *self.bounds[:2], self.precision),
            clean_steps=0,
            budget=self.hysteresis if self.hysteresis > 1 else None,
            steps=0 if tolerant else None,
            overflows=0 if tolerant else None,
        )

    def foresee(
        self, state: BackoffState, loss: Scalar, *, ops: Ops | None = None
    ) -> BackoffState:
        """Return the state unchanged: this rule does not use the loss."""
        del loss, ops
        return state

    def update(
        self, state: BackoffState, seen: Seen, *, ops: Ops | None = None
    ) -> BackoffState:
        """Return the next state.  Traceable: no branch on numbers, no host read."""
        if ops is None:
            ops = ops_of(seen.finite, state.scale)
        where = ops.where
        c = self.constants
        finite = seen.finite

        shrink = where(finite, False, True)
        steps = state.steps
        overflows = state.overflows
        if steps is not None:  # compare whole numbers: exact on every backend
            steps = steps + 1
            overflows = overflows + where(finite, 0, 1)
            tolerated, of = c.share
            shrink = shrink & (overflows * of >= steps * tolerated)
        budget = state.budget
        if budget is not None:
            budget = budget - where(shrink & (budget > 0), 1, 0)
            shrink = shrink & (budget <= 0)
        clean = where(finite, state.clean_steps + 1, 0)
        grow = clean >= self.growth_interval

        scale = state.scale
        # Plain numbers may branch: most steps do not move the scale.
        if ops is not PLAIN or shrink or grow:
            down = ops.cast(scale * c.backoff, "float32")
            down = where(down < self.min_scale, c.low, down)
            up = ops.cast(scale * c.growth, "float32")
            up = where(up > self.max_scale, c.high, up)
            scale = where(shrink, down, where(grow, up, scale))

        if budget is not None:
            refill = refills(self.hysteresis_refill, finite, shrink, grow)
            budget = where(refill, self.hysteresis, budget)
        if steps is not None:
            steps = where(shrink | grow, 0, steps)
            overflows = where(shrink, 0, overflows)
        return BackoffState(
            scale=scale,
            clean_steps=where(grow, 0, clean),
            budget=budget,
            steps=steps,
            overflows=overflows,
        )


def refills(refill: Refill, finite: Scalar, shrink: Scalar, grow: Scalar) -> Scalar:
    """Return whether this step restores the budget of tolerated overflows."""
    if refill in ("clean", "clean_or_change"):
        grow = grow | finite
    return grow | shrink if refill in ("change", "clean_or_change") else grow


def fraction(share: float) -> tuple[int, int]:
    """Return a share as a ratio of whole numbers."""
    if not share:
        return 0, 1
    from fractions import Fraction  # noqa: PLC0415 - slow to import, seldom needed

    return Fraction(share).limit_denominator(10_000).as_integer_ratio()


# -- checks of the configuration, for this class and for those like it -----------------


def scale_of_power(power: float, init_scale: float) -> float:
    """Return 2^`init_scale_power`; raise if `init_scale` was given as well."""
    if isinstance(power, bool) or not isinstance(power, (int, float)):
        message = f"Backoff: `init_scale_power` must be a number, got {power!r}."
        raise PolicyError(message)
    scale: float = PLAIN.exp2(float(power))
    if init_scale not in (_INIT_SCALE, scale):
        message = (
            "Backoff: give `init_scale` or `init_scale_power`, not both, "
            f"got {init_scale!r} and {power!r}."
        )
        raise PolicyError(message)
    return scale


def check_factors(policy: object) -> None:
    """Raise for factors that float32 would round to 0, 1 or inf."""
    number(policy, "init_scale", least=FLOAT32_TINY, most=FLOAT32_MAX)
    number(policy, "growth_factor", least=1.0 + _ULP, most=FLOAT32_MAX)
    number(policy, "backoff_factor", least=FLOAT32_TINY, most=1.0 - _ULP / 2)


def check_bounds_and_counts(policy: object) -> None:
    """Raise for bounds and counts that the rule cannot use."""
    whole(policy, "growth_interval", least=1)
    number(policy, "min_scale", least=FLOAT32_TINY, most=FLOAT32_MAX)
    number(policy, "max_scale", least=FLOAT32_TINY, most=FLOAT32_MAX)
    ordered(policy, "min_scale", "max_scale")
    whole(policy, "hysteresis", least=1)
    choice(policy, "hysteresis_refill", get_args(Refill))
    number(policy, "tolerance", least=0.0, most=1.0)
