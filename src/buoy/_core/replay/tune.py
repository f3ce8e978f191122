"""Find the static scale, and the settings of a policy, with the least loss.

The loss is the share of skipped steps plus, of the others, the share of gradients that
underflow (`losses`).  The confidence comes from resampling the trace by blocks.  The
settings of a policy are chosen on every other block and evaluated on the rest, which
avoids selection bias.  One value is not held out: the best static scale of the whole
trace is tried as a start.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from buoy._core.errors import TraceError
from buoy._core.replay.losses import Blocks, quantile, resamples
from buoy._core.replay.settings import Family, Member, Tunable
from buoy._core.replay.trace import Trace, is_trace
from buoy._core.replay.walk import walk

__all__ = ["Sureness", "Tuned", "TunedPolicy", "TunedStatic", "tune"]

Sureness = Literal["sure", "likely", "unsure"]

_RESAMPLES = 300
_FEW_BLOCKS = 8  # too few to resample
_SAME = 1e-6  # losses closer than this are the same: one gradient in a million
_MOST_STEPS = 2_000_000  # all settings together; policies that measure cost more
_MEASURING = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedStatic:
    """The fixed power of two that would have lost least."""

    exponent: int  # the middle of those that lose the same
    lowest: int  # of those
    highest: int
    loss: float
    skipped_share: float
    interval: tuple[int, int]  # 90 % of the resampled traces choose within this
    confidence: float  # share of the resampled traces in which it is among the best
    sureness: Sureness
    largest_safe: int | None  # the largest that skips no more than `max_skipped`
    largest_safe_interval: tuple[int, int] | None
    max_skipped: float

    @property
    def scale(self) -> float:
        """The scale: 2^exponent."""
        return 2.0**self.exponent


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedPolicy:
    """The settings of one policy that would have lost least."""

    name: str
    settings: dict[str, Any]  # of the best; empty where it is the one given
    loss: float
    given_loss: float  # of the policy as it was given
    gain: float  # of tuning it so, on blocks that had no part in the choice
    gain_interval: tuple[float, float]  # 90 % of the resampled traces
    confidence: float  # share of the resampled traces in which it gained
    sureness: Sureness  # that the best is better than the given
    tried: int
    alike: int  # settings as good as the best within the noise, itself included
    steps: int  # of the trace, from its start, that were used


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The result of tuning."""

    trace: str
    steps: int
    objective: Literal["skipped+underflow", "skipped+binades"]
    static: TunedStatic
    policies: tuple[TunedPolicy, ...]


def tune(
    trace: Trace,
    policies: str | Iterable[Tunable] = (),
    *,
    tries: Mapping[str, Sequence[Any]] | None = None,
    max_skipped: float = 1e-3,
    seed: int = 0,
) -> Tuned:
    """Find the best static scale, and the best settings of each policy named.

    A policy is a name, a name with fixed settings, or an object.  `tries` says which
    values of which parameters to try, instead of the usual ones.

    Example:
        >>> steady = Trace(amax_log2=(-3.0, -2.0, -4.0, -2.5) * 100)
        >>> tune(steady).static.exponent
        17
    """
    blocks = Blocks(is_trace(trace))
    if isinstance(policies, str):
        policies = [policies]
    static = _tuned_static(blocks, max_skipped, seed)
    return Tuned(
        trace=trace.name,
        steps=len(trace),
        objective=(
            "skipped+binades" if blocks.charges_binades else "skipped+underflow"
        ),
        static=static,
        policies=tuple(
            _tuned_policy(blocks, Family(given, tries, static.scale), seed)
            for given in policies
        ),
    )


def _tuned_static(blocks: Blocks, max_skipped: float, seed: int) -> TunedStatic:
    exponents = _candidates(blocks)
    losses = [blocks.of_static(exponent) for exponent in exponents]
    skips = [blocks.of_skips(exponent) for exponent in exponents]
    low, middle, high = _plateau(_means(losses, blocks))
    safe = _largest_safe(_means(skips, blocks), max_skipped)

    middles = []
    wins = 0
    safes = []
    for drawn in resamples(_RESAMPLES, len(blocks), seed):
        first, chosen, last = _plateau(_means(losses, blocks, drawn))
        middles.append(exponents[chosen])
        wins += first <= middle <= last
        at = _largest_safe(_means(skips, blocks, drawn), max_skipped)
        if at is not None:
            safes.append(exponents[at])
    confidence = wins / _RESAMPLES
    return TunedStatic(
        exponent=exponents[middle],
        lowest=exponents[low],
        highest=exponents[high],
        loss=blocks.mean(losses[middle]),
        skipped_share=blocks.mean(skips[middle]),
        interval=_interval(middles),
        confidence=confidence,
        sureness=_sureness(confidence, blocks),
        largest_safe=None if safe is None else exponents[safe],
        largest_safe_interval=_interval(safes) if safes else None,
        max_skipped=max_skipped,
    )


def _candidates(blocks: Blocks) -> range:
    known = [best for best in blocks.best.exponents if best is not None]
    if not known:
        message = (
            "The trace has no step with gradients that are finite and not all 0: "
            "there is nothing to tune. Record a run that learns."
        )
        raise TraceError(message)
    # From where even the largest gradient underflows to where every step overflows,
    # within float32's exponents.
    span = math.ceil(blocks.trace.max_log2 - blocks.trace.zero_log2)
    return range(max(min(known) - span, -126), min(max(known) + 1, 127) + 1)


def _means(
    rows: Sequence[Sequence[float]], blocks: Blocks, drawn: Sequence[int] | None = None
) -> list[float]:
    return [blocks.mean(row, drawn) for row in rows]


def _plateau(losses: Sequence[float]) -> tuple[int, int, int]:
    """Return first, middle and last index of the range around the least loss."""
    at = min(range(len(losses)), key=losses.__getitem__)
    limit = losses[at] + _SAME
    first = last = at
    while first > 0 and losses[first - 1] <= limit:
        first -= 1
    while last + 1 < len(losses) and losses[last + 1] <= limit:
        last += 1
    return first, (first + last) // 2, last


def _largest_safe(skips: Sequence[float], most: float) -> int | None:
    return max((i for i, share in enumerate(skips) if share <= most), default=None)


def _interval(values: Sequence[int]) -> tuple[int, int]:
    return int(quantile(values, 0.05)), int(quantile(values, 0.95))


def _sureness(confidence: float, blocks: Blocks) -> Sureness:
    if len(blocks) < _FEW_BLOCKS or confidence < 0.7:
        return "unsure"
    return "sure" if confidence >= 0.95 else "likely"


def _tuned_policy(blocks: Blocks, family: Family, seed: int) -> TunedPolicy:
    tried = family.members()
    blocks = _shortened(blocks, tried)
    losses = [blocks.of_walk(walk(member.policy, blocks.trace)) for member in tried]
    totals = _means(losses, blocks)
    best = _least(totals)
    gains = _held_out_gains(losses, blocks)
    drawn = list(resamples(_RESAMPLES, len(blocks), seed))
    spread = [blocks.mean(gains, weights) for weights in drawn]
    confidence = sum(gain > _SAME for gain in spread) / len(spread)
    return TunedPolicy(
        name=family.name,
        settings=tried[best].settings,
        loss=totals[best],
        given_loss=totals[0],
        gain=blocks.mean(gains),
        gain_interval=(quantile(spread, 0.05), quantile(spread, 0.95)),
        confidence=confidence,
        sureness=_sureness(confidence, blocks),
        tried=len(tried),
        alike=sum(_alike(losses[best], row, drawn, blocks) for row in losses),
        steps=len(blocks.trace),
    )


def _shortened(blocks: Blocks, tried: Sequence[Member]) -> Blocks:
    each = _MOST_STEPS // len(tried)
    if tried[0].policy.wants:
        each //= _MEASURING
    if len(blocks.trace) <= each:
        return blocks
    return Blocks(blocks.trace.head(each))


def _least(totals: Sequence[float]) -> int:
    """Return the first of those that lose least: the given one, if it is among them."""
    limit = min(totals) + _SAME
    return next(i for i, total in enumerate(totals) if total <= limit)


def _held_out_gains(losses: Sequence[Sequence[float]], blocks: Blocks) -> list[float]:
    """Return, block by block, what tuning on the other half saved."""
    gains = [0.0] * len(blocks)
    for half in (0, 1):
        chosen_on = [int(block % 2 != half) for block in range(len(blocks))]
        if not any(chosen_on):
            continue
        chosen = losses[_least(_means(losses, blocks, chosen_on))]
        for block in range(half, len(blocks), 2):
            gains[block] = losses[0][block] - chosen[block]
    return gains


def _alike(
    best: Sequence[float],
    other: Sequence[float],
    drawn: Sequence[Sequence[int]],
    blocks: Blocks,
) -> bool:
    """Return whether the other is no worse than the best in 5 % of the resamples."""
    more = [theirs - ours for ours, theirs in zip(best, other, strict=True)]
    no_worse = sum(blocks.mean(more, weights) <= _SAME for weights in drawn)
    return no_worse >= 0.05 * len(drawn)
