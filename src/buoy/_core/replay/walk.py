"""Run one policy over a trace; return where its scale moved and which steps it lost.

A policy that reads only `finite` is a finite-state machine: its states are interned and
every transition is computed once.  Other policies run step by step.
"""

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from operator import sub

from buoy._core.bounds import bounds_of, foreseen, initial, moved
from buoy._core.errors import ScaleCollapsedError
from buoy._core.ops import PLAIN
from buoy._core.policies.policy import Policy
from buoy._core.replay.trace import Trace
from buoy._core.state import Seen, State
from buoy._core.step import MEASUREMENTS, SMALL_LOG2

__all__ = ["Walk", "walk"]

_MOST_STATES = 2**17  # about 50 MB; some rules count without end
_UNKNOWN = -1
_FINITE = Seen(finite=True)
_OVERFLOW = Seen(finite=False)


@dataclass(frozen=True, slots=True, repr=False)
class Walk:
    """The path of one policy: the scale as runs of equal log2, and the lost steps."""

    steps: int
    starts: "array[int]"  # first step of every run
    exponents: "array[float]"  # log2 of the scale in it
    skipped: "array[int]"  # steps that were not applied
    first_scale: float
    final_scale: float  # for the step after the last
    collapsed: bool = False

    def __repr__(self) -> str:
        return f"Walk({self.steps} steps, {len(self.starts)} runs of equal scales)"

    def runs(self) -> Iterator[tuple[int, int, float]]:
        """Yield start, end and log2 of the scale of every run."""
        starts = self.starts
        last = len(self.starts) - 1
        for i, exponent in enumerate(self.exponents):
            yield starts[i], starts[i + 1] if i < last else self.steps, exponent

    def lengths(self) -> Iterator[int]:
        """Yield the number of steps of every run."""
        return map(sub, (*self.starts[1:], self.steps), self.starts)

    def between(
        self, cuts: Sequence[int]
    ) -> Iterator[tuple[list[int], "array[float]"]]:
        """Yield what is before the first cut, and after each: steps, log2 of the scale.

        The steps are those of each run that were applied.
        """
        edges = [0, *(min(cut, self.steps) for cut in cuts), self.steps]
        for start, end in pairwise(edges):
            first = bisect_right(self.starts, start)
            last = bisect_left(self.starts, end, first) if start < end else first - 1
            begins = [start, *self.starts[first:last], end][: last - first + 2]
            used = list(map(sub, begins[1:], begins))
            lost = self.skipped
            for at in range(bisect_left(lost, start), bisect_left(lost, end)):
                used[bisect_right(begins, lost[at]) - 1] -= 1
            yield used, self.exponents[first - 1 : last]

    def stretches(
        self, cuts: Sequence[int]
    ) -> Iterator[tuple[int, int, float, int, Sequence[int]]]:
        """Yield the runs, cut: start, end, log2 of the scale, number of cuts, lost.

        The number is of the cuts at or before the stretch; `lost` are its steps that
        were skipped.
        """
        lost = self.skipped
        none = self.skipped[:0]
        at = 0
        cut = 0
        gone = 0
        next_cut = cuts[0] if cuts else self.steps
        next_lost = lost[0] if lost else self.steps
        for _, end, exponent in self.runs():
            while at < end:
                while next_cut <= at:
                    cut += 1
                    next_cut = cuts[cut] if cut < len(cuts) else self.steps
                stop = min(end, next_cut)
                if next_lost >= stop:
                    yield at, stop, exponent, cut, none
                else:
                    until = bisect_left(lost, stop, gone)
                    yield at, stop, exponent, cut, lost[gone:until]
                    gone = until
                    next_lost = lost[gone] if gone < len(lost) else self.steps
                at = stop


def walk(policy: Policy, trace: Trace) -> Walk:
    """Run `policy` over `trace`.

    Example:
        >>> from buoy import Backoff
        >>> went = walk(Backoff(), Trace(amax_log2=(1.0, 1.0, -9.0)))
        >>> list(went.runs()), list(went.skipped)
        ([(0, 1, 16.0), (1, 2, 15.0), (2, 3, 14.0)], [0, 1])
    """
    if _is_machine(policy):
        return _walk_blind(policy, trace)
    return _walk_seeing(policy, trace)


def _is_machine(policy: Policy) -> bool:
    try:
        hash(policy.init())
    except TypeError:
        return False
    return not policy.wants


class _Machine:
    """The states of a policy by number, and the transitions found so far."""

    def __init__(self, policy: Policy, trace: Trace) -> None:
        self.policy = policy
        self.trace = trace
        self.bounds = bounds_of(policy)
        self.states: list[State] = []
        self.numbers: dict[State, int] = {}
        self.entered: dict[float, tuple[float, float]] = {}  # exponent, limit by scale
        self.exponents: list[float] = []
        self.limits: list[float] = []
        self.after_finite: list[int] = []
        self.after_overflow: list[int] = []
        self.at_rest: list[int] = []  # after a finite step, if the scale is the same

    def number(self, state: State) -> int:
        """Return the number of a state; assign one if it is new."""
        number = self.numbers.setdefault(state, len(self.states))
        if number == len(self.states):
            if state.scale not in self.entered:
                exponent = math.log2(state.scale)
                self.entered[state.scale] = exponent, self.trace.max_log2 - exponent
            exponent, limit = self.entered[state.scale]
            self.states.append(state)
            self.exponents.append(exponent)
            self.limits.append(limit)
            self.after_finite.append(_UNKNOWN)
            self.after_overflow.append(_UNKNOWN)
            self.at_rest.append(_UNKNOWN)
        return number

    def after(self, number: int, *, finite: bool) -> int:
        """Return the number of the next state."""
        known = (self.after_finite if finite else self.after_overflow)[number]
        return known if known >= 0 else self._learn(number, finite=finite)

    def _learn(self, number: int, *, finite: bool) -> int:
        seen = _FINITE if finite else _OVERFLOW
        before = self.states[number]
        bounds = self.bounds
        state = moved(self.policy, before, seen, ops=PLAIN, bounds=bounds)
        if len(self.states) >= _MOST_STATES:
            self._forget()
            return self.number(state)
        after = self.number(state)
        (self.after_finite if finite else self.after_overflow)[number] = after
        if finite and self.exponents[after] == self.exponents[number]:
            self.at_rest[number] = after
        return after

    def _forget(self) -> None:
        # In place: the caller holds references to the lists.
        self.numbers.clear()
        self.states.clear()
        self.exponents.clear()
        self.limits.clear()
        self.after_finite.clear()
        self.after_overflow.clear()
        self.at_rest.clear()


def _walk_blind(policy: Policy, trace: Trace) -> Walk:
    machine = _Machine(policy, trace)
    at_rest = machine.at_rest
    first = last = initial(policy)
    state = machine.number(first)
    exponent = machine.exponents[state]
    limit = machine.limits[state]
    starts = array("q", [0])
    exponents = array("d", [exponent])
    skipped = array("q")
    step = 0
    gave_up = False
    try:
        for step, amax in enumerate(trace.amax_log2):
            if finite := amax <= limit:
                after = at_rest[state]
                if after >= 0:
                    state = after
                    continue
            else:
                skipped.append(step)
            state = machine.after(state, finite=finite)
            if machine.exponents[state] != exponent:
                exponent = machine.exponents[state]
                limit = machine.limits[state]
                starts.append(step + 1)
                exponents.append(exponent)
        if starts[-1] == len(trace):  # a scale that no step has used
            del starts[-1], exponents[-1]
        last = machine.states[state]
    except ScaleCollapsedError as error:
        gave_up = True
        last = error.state or machine.states[state]
    return Walk(
        steps=step + 1,
        starts=starts,
        exponents=exponents,
        skipped=skipped,
        first_scale=first.scale,
        final_scale=last.scale,
        collapsed=gave_up,
    )


def _walk_seeing(policy: Policy, trace: Trace) -> Walk:
    show = _shown(policy, trace)
    bounds = bounds_of(policy)
    losses = trace.loss_log2 if "loss" in policy.wants else None
    starts = array("q")
    exponents = array("d")
    skipped = array("q")

    state: State = initial(policy)
    first = state
    scale = None
    step = 0
    gave_up = False
    exponent = limit = math.nan
    try:
        for step, amax in enumerate(trace.amax_log2):
            if losses is not None:
                loss = PLAIN.exp2(losses[step])
                state = foreseen(policy, state, loss, ops=PLAIN, bounds=bounds)
            if state.scale != scale:
                scale = state.scale
                exponent = math.log2(scale)
                limit = trace.max_log2 - exponent
                starts.append(step)
                exponents.append(exponent)
            finite = amax <= limit
            seen = show(step, amax, exponent, finite)
            if not finite:
                skipped.append(step)
            state = moved(policy, state, seen, ops=PLAIN, bounds=bounds)
    except ScaleCollapsedError as error:
        gave_up = True
        state = error.state or state
    return Walk(
        steps=step + 1,
        starts=starts,
        exponents=exponents,
        skipped=skipped,
        first_scale=first.scale,
        final_scale=state.scale,
        collapsed=gave_up,
    )


def _shown(policy: Policy, trace: Trace) -> Callable[[int, float, float, bool], Seen]:
    """Return the function that computes what a front end would have measured."""
    sees_amax = "amax_log2" in policy.wants
    zero_log2 = trace.zero_log2
    small = _small(trace) if "underflow" in policy.wants else None
    due = MEASUREMENTS["underflow"].due
    losses = trace.loss_log2 if "loss_finite" in policy.wants else None

    def show(step: int, amax: float, exponent: float, finite: bool) -> Seen:  # noqa: FBT001
        usable = None if losses is None else losses[step] < math.inf
        if not finite:
            return Seen(False, math.inf if sees_amax else None, loss_finite=usable)
        scaled = None
        if sees_amax:
            scaled = amax + exponent
            if scaled < zero_log2:
                scaled = -math.inf  # all gradients underflow to 0
        if small is None or not due(step):
            return Seen(True, scaled, loss_finite=usable)
        return Seen(True, scaled, small(step, exponent), loss_finite=usable)

    return show


def _small(trace: Trace) -> Callable[[int, float], float | None]:
    histograms = trace.weight_histograms
    starts = [histogram.start for histogram in histograms]

    def small(step: int, exponent: float) -> float | None:
        at = bisect_right(starts, step) - 1
        return None if at < 0 else share(at, exponent)

    @lru_cache(maxsize=2**10)
    def share(at: int, exponent: float) -> float | None:
        zero = histograms[at].below(trace.zero_log2 - exponent)
        if zero >= 1.0:
            return None
        return (histograms[at].below(SMALL_LOG2 - exponent) - zero) / (1.0 - zero)

    return small
