"""Run policies over a trace, and evaluate the scales that they would have used.

Replay covers only the scale: the gradients are those that were recorded, so the effect
of a skipped step or of underflow on the rest of the run is not included.
"""

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, count, islice
from operator import mul, ne

from buoy._core.ops import PLAIN
from buoy._core.policies.policy import Policy
from buoy._core.policies.registry import policy as make
from buoy._core.replay.oracle import Best
from buoy._core.replay.trace import Histogram, Trace, is_trace
from buoy._core.replay.walk import Walk, walk

__all__ = ["Replayed", "oracle", "replay", "replay_with_oracle"]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Replayed:
    """The result of one policy on one trace.

    Example:
        >>> replay(Trace(amax_log2=(-2.0, 3.0, -2.0)), ["torch"])
        (Replayed('torch', skipped=1 of 3, mean_scale=2^15.7, regret=2.33),)

    `too_low` and `too_high` say how far the scale was below and above the best scale,
    in binades (factors of two), as a mean over the steps; regret is their sum.  The
    best scale is the largest power of two that does not overflow; a scale above it
    costs the step.  Steps without a best scale are left out: all gradients are 0, or
    non-finite at any scale.
    """

    name: str
    policy: Policy | None  # None for the oracle
    steps: int  # fewer than the trace has, if the policy gave up
    skipped: int
    weight_underflow: float | None  # share of gradients; None: not recorded
    activation_underflow: float | None
    first_scale: float
    final_scale: float
    mean_scale_log2: float
    too_low: float
    too_high: float
    collapsed_at: int | None  # the step at which the policy gave up
    walk: Walk  # every step: where the scale moved, which steps were lost

    def __repr__(self) -> str:
        parts = [f"{self.name!r}", f"skipped={self.skipped} of {self.steps}"]
        if self.weight_underflow is not None:
            parts.append(f"weight_underflow={self.weight_underflow:.3g}")
        parts.append(f"mean_scale=2^{self.mean_scale_log2:.1f}")
        parts.append(f"regret={self.regret:.2f}")
        return f"Replayed({', '.join(parts)})"

    @property
    def regret(self) -> float:
        """Mean distance from the oracle's scale, in factors of two."""
        return self.too_low + self.too_high

    @property
    def skipped_share(self) -> float:
        """Share of the steps that were not applied."""
        return self.skipped / self.steps

    @property
    def mean_scale(self) -> float:
        """Geometric mean of the scale over the steps."""
        return float(PLAIN.exp2(self.mean_scale_log2))

    @property
    def skips(self) -> Sequence[int]:
        """The steps that were not applied."""
        return self.walk.skipped

    def scales(self) -> Iterator[tuple[int, int, float]]:
        """Yield start, end and log2 of the scale of every run of equal scales."""
        return self.walk.runs()


def replay(
    trace: Trace, policies: Mapping[str, str | Policy] | Iterable[str | Policy]
) -> tuple[Replayed, ...]:
    """Run each policy over the trace, in the order given.

    Each policy is an object or a name.  Pass a mapping to name the results yourself.

    Example:
        >>> from buoy import Static
        >>> trace = Trace(amax_log2=(-2.0, 3.0, -2.0))
        >>> for result in replay(trace, ["torch", Static(init_scale=2.0**10)]):
        ...     print(result.name, result.skipped, round(result.regret, 2))
        torch 1 2.33
        Static 0 5.33
    """
    judge = _Judge(is_trace(trace))
    return tuple(
        judge.judged(name, chosen, walk(chosen, trace))
        for name, chosen in _named(policies)
    )


def replay_with_oracle(
    trace: Trace,
    policies: Mapping[str, str | Policy] | Iterable[str | Policy],
    progress: Callable[[str], None] | None = None,
) -> tuple[Replayed, ...]:
    """Do both, `replay` and `oracle`, in less time; the oracle comes last.

    `progress` is called with what begins.
    """
    judge = _Judge(is_trace(trace))
    results = []
    for name, chosen in _named(policies):
        if progress is not None:
            progress(f"Replaying {name}")
        results.append(judge.judged(name, chosen, walk(chosen, trace)))
    if progress is not None:
        progress("Replaying the oracle")
    return *results, _oracle(judge)


def oracle(trace: Trace) -> Replayed:
    """Evaluate the best scale of every step: the largest power of two that fits.

    No policy can skip less, or underflow less without skipping.  What the oracle loses
    is due to the format.

    Example:
        >>> best = oracle(Trace(amax_log2=(-2.0, 3.0, -2.0)))
        >>> [exponent for _, _, exponent in best.scales()]
        [17.0, 12.0, 17.0]
    """
    return _oracle(_Judge(is_trace(trace)))


def _oracle(judge: "_Judge") -> Replayed:
    trace = judge.trace
    starts = array("q")
    exponents = array("d")
    lost = array("q")
    fits = judge.best.exponents
    if judge.best.complete:
        starts.append(0)
        starts.extend(compress(count(1), map(ne, fits, islice(fits, 1, None))))
        exponents.extend(map(fits.__getitem__, starts))
    else:
        best = next((best for best in fits if best is not None), 0)
        for step, here in enumerate(fits):
            if not trace.amax_log2[step] < math.inf:
                lost.append(step)
            if not starts or (here is not None and here != best):
                best = best if here is None else here
                starts.append(step)
                exponents.append(best)
    went = Walk(
        steps=len(trace),
        starts=starts,
        exponents=exponents,
        skipped=lost,
        first_scale=PLAIN.exp2(exponents[0]),
        final_scale=PLAIN.exp2(exponents[-1]),
    )
    return judge.judged("oracle", None, went)


def _named(
    policies: Mapping[str, str | Policy] | Iterable[str | Policy],
) -> list[tuple[str, Policy]]:
    if isinstance(policies, Mapping):
        return [(name, make(given)) for name, given in policies.items()]
    if isinstance(policies, (str, Policy)):
        policies = [policies]
    return [
        (given if isinstance(given, str) else type(given).__name__, make(given))
        for given in policies
    ]


class _Judge:
    """Evaluates policies on one trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.best = Best(trace)
        self.cuts = sorted(
            {h.start for h in (*trace.weight_histograms, *trace.activation_histograms)}
        )

    def judged(self, name: str, policy: Policy | None, went: Walk) -> Replayed:
        """Return the result of one walk."""
        # The oracle is what regret is measured against.
        too_low, too_high = (0.0, 0.0) if policy is None else self._regret(went)
        weights, activations = self._underflow(went)
        return Replayed(
            name=name,
            policy=policy,
            steps=went.steps,
            skipped=len(went.skipped),
            weight_underflow=weights,
            activation_underflow=activations,
            first_scale=went.first_scale,
            final_scale=went.final_scale,
            mean_scale_log2=_mean_log2(went),
            too_low=too_low,
            too_high=too_high,
            collapsed_at=went.steps - 1 if went.collapsed else None,
            walk=went,
        )

    def _regret(self, went: Walk) -> tuple[float, float]:
        if self.best.complete and not went.skipped and min(went.exponents) > -math.inf:
            # The same numbers in another order: whole ones, so the sum is the same.
            used = map(mul, went.lengths(), map(math.floor, went.exponents))
            return (self.best.sum(0, went.steps) - sum(used)) / went.steps, 0.0
        low = high = 0.0
        for start, end, exponent, _, lost in went.stretches(()):
            low += self.best.too_low(start, end, exponent, lost)
            if lost:
                high += self.best.too_high(exponent, lost)
        known = self.best.known(0, went.steps) or 1
        return low / known, high / known

    def _underflow(self, went: Walk) -> tuple[float | None, float | None]:
        trace = self.trace
        cuts = self.cuts
        weights, activations = (
            _mean_underflow(went, cuts, _at_cuts(kind, cuts), trace.zero_log2)
            for kind in (trace.weight_histograms, trace.activation_histograms)
        )
        return weights, activations


def _mean_underflow(
    went: Walk,
    cuts: Sequence[int],
    histograms: Sequence[Histogram | None],
    zero_log2: float,
) -> float | None:
    """Return the mean share of the gradients that underflow in applied steps."""
    if not any(histograms):
        return None
    total = 0.0
    steps = 0
    for (used, exponents), histogram in zip(
        went.between(cuts), histograms, strict=True
    ):
        if histogram is not None:
            below = {log2: histogram.below(zero_log2 - log2) for log2 in {*exponents}}
            total = sum(map(mul, used, map(below.__getitem__, exponents)), total)
            steps += sum(used)
    return total / steps if steps else None


def _at_cuts(
    histograms: Sequence[Histogram], cuts: Sequence[int]
) -> list[Histogram | None]:
    """Return the histogram that holds before the first cut, and after each."""
    by_start = {histogram.start: histogram for histogram in histograms}
    held: list[Histogram | None] = [None]
    for cut in cuts:
        held.append(by_start.get(cut, held[-1]))
    return held


def _mean_log2(went: Walk) -> float:
    return math.fsum(map(mul, went.lengths(), went.exponents)) / went.steps
