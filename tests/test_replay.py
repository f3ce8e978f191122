"""Replay: what a policy would have done, judged against the oracle."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import buoy
import buoy.trace
from buoy import (
    Backoff,
    NoScaling,
    Replayed,
    Seen,
    Static,
    oracle,
    replay,
)
from buoy._core.bounds import moved
from buoy._core.ops import PLAIN
from buoy.trace import Histogram, Trace

sizes = st.one_of(
    st.floats(-40.0, 20.0), st.sampled_from([math.inf, -math.inf, math.nan])
)


def stepwise(policy: Any, trace: Trace) -> tuple[list[float], list[int]]:
    """Lead a policy through a trace the slow way: scales used, steps not applied."""
    state, scales, skipped = policy.init(), [], []
    for step, amax in enumerate(trace.amax_log2):
        if "loss" in policy.wants and trace.loss_log2 is not None:
            state = policy.foresee(state, 2.0 ** trace.loss_log2[step])
        scale = state.scale
        product = amax + (math.log2(scale) if 0.0 < scale < math.inf else math.nan)
        if scale == 0.0 and math.isfinite(amax):
            product = -math.inf
        finite = product <= trace.max_log2
        seen = Seen(finite=finite)
        if "amax_log2" in policy.wants:
            seen = Seen(finite=finite, amax_log2=_measured(product, finite, trace))
        scales.append(scale)
        if not finite:
            skipped.append(step)
        try:
            state = moved(policy, state, seen, ops=PLAIN)
        except buoy.ScaleCollapsedError:
            break
    return scales, skipped


def _measured(product: float, finite: bool, trace: Trace) -> float:
    if not finite:
        return math.inf
    return product if product >= trace.zero_log2 else -math.inf


def scales_of(result: Replayed) -> list[float]:
    """Unroll the runs."""
    return [log2 for start, end, log2 in result.scales() for _ in range(end - start)]


def log2s(scales: Sequence[float]) -> list[float]:
    """Return log2, of 0 and inf too."""
    odd = {0.0: -math.inf, math.inf: math.inf}
    return [odd[s] if s in odd else math.log2(s) for s in scales]


@settings(max_examples=25)
@given(amax=st.lists(sizes, min_size=1, max_size=60))
@pytest.mark.parametrize("name", buoy.policies())
def test_replay_does_what_the_policy_does_step_by_step(
    name: str, amax: list[float]
) -> None:
    """Remembered transitions and runs change nothing, for every policy there is."""
    losses = [a if math.isfinite(a) else 3.0 for a in amax]
    trace = Trace(amax_log2=amax, loss_log2=losses)
    scales, skipped = stepwise(buoy.policy(name), trace)
    (result,) = replay(trace, [name])
    assert repr(scales_of(result)) == repr(log2s(scales))
    assert list(result.skips) == skipped
    assert result.steps == len(scales)
    assert (result.collapsed_at is None) == (len(scales) == len(amax)) or (
        result.collapsed_at == len(amax) - 1
    )


@pytest.mark.parametrize("name", ["backoff", "megatron", "fairseq", "deepspeed"])
def test_forgetting_transitions_changes_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is bounded by forgetting, and the result is the same."""
    trace = buoy.trace.synthetic("spikes", steps=2000)
    before = replay(trace, [name])
    monkeypatch.setattr("buoy._core.replay.walk._MOST_STATES", 7)
    after = replay(trace, [name])
    assert scales_of(before[0]) == scales_of(after[0])
    assert before[0].skips == after[0].skips


def test_an_overflow_lies_strictly_above_the_limit() -> None:
    """A gradient of just the largest number is no overflow."""
    trace = Trace(amax_log2=(5.0, 5.0 + 1e-9), max_log2=15.0)
    (result,) = replay(trace, [Static(init_scale=2.0**10)])
    assert list(result.skips) == [1]


def test_regret_is_in_binades_and_split_by_side() -> None:
    """Too low counts on clean steps, too high on lost ones, against whole exponents."""
    trace = Trace(amax_log2=(0.0, 3.0, 9.0, -math.inf, math.nan), max_log2=15.0)
    (result,) = replay(trace, [Static(init_scale=2.0**10)])
    # Best exponents: 15, 12, 6; the last two steps have none.
    assert result.too_low == (5 + 2) / 3
    assert result.too_high == 4 / 3
    assert result.regret == result.too_low + result.too_high
    assert list(result.skips) == [2, 4]


def test_a_scale_between_powers_of_two_has_no_regret_within_its_binade() -> None:
    """Only whole binades count: 2^12.5 is as good as the oracle's 2^12."""
    trace = Trace(amax_log2=(2.5,), max_log2=15.0)
    (result,) = replay(trace, [Static(init_scale=2.0**12.5)])
    assert (result.skipped, result.regret) == (0, 0.0)


@settings(max_examples=50)
@given(amax=st.lists(sizes, min_size=1, max_size=40))
def test_nobody_beats_the_oracle(amax: list[float]) -> None:
    """It skips only what overflows at any scale, and has no regret."""
    trace = Trace(amax_log2=amax, weight_histograms=[Histogram(0, -60, (1,) * 60)])
    best = oracle(trace)
    assert list(best.skips) == [i for i, a in enumerate(amax) if not a < math.inf]
    assert best.regret == 0.0
    for result in replay(trace, ["backoff", "static", "lognormal"]):
        assert result.skipped >= best.skipped
        assert result.regret >= 0.0


def test_underflow_is_the_share_below_half_the_smallest_number() -> None:
    """At scale 2^5 what lies below 2^-30 rounds to zero in FP16."""
    histogram = Histogram(0, -32, (1, 1, 2, 4))
    trace = Trace(amax_log2=(-28.0,) * 4, weight_histograms=(histogram,))
    (result,) = replay(trace, [Static(init_scale=2.0**5)])
    assert result.weight_underflow == 0.25
    assert result.activation_underflow is None


def test_underflow_counts_applied_steps_under_the_histogram_of_their_time() -> None:
    """Skipped steps and steps before the first histogram have no say."""
    trace = Trace(
        amax_log2=(0.0, 0.0, 20.0, 0.0),
        weight_histograms=(Histogram(1, -40, (1,)), Histogram(3, 0, (1,))),
    )
    (result,) = replay(trace, [NoScaling()])
    assert list(result.skips) == [2]
    assert result.weight_underflow == 0.5


def test_a_trace_without_histograms_cannot_tell_what_underflows() -> None:
    """Not measured is None, never 0."""
    (result,) = replay(Trace(amax_log2=(-90.0,)), ["none"])
    assert result.weight_underflow is None
    assert result.activation_underflow is None


def test_means_and_ends_of_the_scale_are_reported() -> None:
    """The mean is of log2 over the steps; the final scale is the next step's."""
    policy = Backoff(init_scale=2.0**10, growth_interval=2)
    (result,) = replay(Trace(amax_log2=(-9.0,) * 4), [policy])
    assert result.first_scale == 2.0**10
    assert result.final_scale == 2.0**12
    assert result.mean_scale_log2 == 10.5
    assert list(result.scales()) == [(0, 2, 10.0), (2, 4, 11.0)]


def test_a_policy_that_gives_up_stops_there_and_says_where() -> None:
    """The step at which it raised is the last one replayed."""
    trace = Trace(amax_log2=(math.nan,) * 100)
    fairseq, torch = replay(trace, ["fairseq", "torch"])
    assert fairseq.collapsed_at == 28
    assert fairseq.steps == 29
    assert fairseq.skipped_share == 1.0
    assert torch.collapsed_at is None
    assert torch.skipped == 100


def test_non_finite_steps_are_skipped_whatever_the_peer_does() -> None:
    """Also those that a peer applies, because it does not check."""
    trace = Trace(amax_log2=(9.0, 0.0))
    unchecked = buoy.policy("apex", loss_scale=2.0**10)
    results = replay(trace, [unchecked, Static(init_scale=2.0**10)])
    assert [1, 1] == [result.skipped for result in results]


def test_names_objects_and_mappings_are_taken() -> None:
    """Results come in the order given, under the names given."""
    trace = Trace(amax_log2=(1.0,))
    assert [r.name for r in replay(trace, ["torch", Static()])] == ["torch", "Static"]
    assert [r.name for r in replay(trace, {"mine": Static(), "t": "torch"})] == [
        "mine",
        "t",
    ]
    assert [r.name for r in replay(trace, "torch")] == ["torch"]
    with pytest.raises(buoy.UnknownPolicyError, match="Did you mean 'torch'"):
        replay(trace, ["torhc"])


@dataclass(frozen=True)
class Watcher:
    """A policy that writes down what it is shown."""

    log: list[Any]
    wants: frozenset[str]
    precision: str = "float32"
    scale: float = 2.0**5

    bounds = buoy.Bounds()

    def init(self, *, scale: Any = None) -> Any:
        """Hold the scale."""
        return Static(init_scale=self.scale).init(scale=scale)

    def foresee(self, state: Any, loss: float, *, ops: Any = None) -> Any:
        """Note the loss."""
        del ops
        self.log.append(loss)
        return state

    def update(self, state: Any, seen: Seen, *, ops: Any = None) -> Any:
        """Note what was seen."""
        del ops
        self.log.append(seen)
        return state


def shown(wants: set[str], trace: Trace) -> list[Any]:
    """Replay a watcher and return what it saw."""
    log: list[Any] = []
    replay(trace, [Watcher(log, frozenset(wants))])  # type: ignore[list-item]
    return log


def test_a_policy_is_shown_what_it_wants_and_nothing_else() -> None:
    """The size is of scaled gradients, the loss of unscaled; unasked is None."""
    trace = Trace(amax_log2=(1.0, 12.0, -31.0), loss_log2=(3.0, -1.0, -math.inf))
    assert shown({"amax_log2"}, trace) == [
        Seen(finite=True, amax_log2=6.0),
        Seen(finite=False, amax_log2=math.inf),
        Seen(finite=True, amax_log2=-math.inf),  # all of it became zero
    ]
    assert shown({"loss"}, trace) == [
        8.0, Seen(finite=True), 0.5, Seen(finite=False), 0.0, Seen(finite=True)
    ]  # fmt: skip


def test_the_share_of_small_gradients_is_shown_every_16th_step() -> None:
    """Of those that did not become zero, how many are below 2^-20."""
    # Scaled by 2^5: one in [2^-26, 2^-25) is gone, one small, two large.
    trace = Trace(
        amax_log2=(-10.0,) * 33,
        weight_histograms=(Histogram(0, -31, (1, 1)), Histogram(20, -12, (1,))),
    )
    found = [seen.underflow for seen in shown({"underflow"}, trace)]
    assert [i for i, share in enumerate(found) if share is not None] == [15, 31]
    assert (found[15], found[31]) == (1.0, 0.0)


def test_what_is_long_has_a_short_repr() -> None:
    """A trace of a million steps is one line in a notebook."""
    trace = buoy.trace.synthetic("noise", steps=3000)
    (result,) = replay(trace, ["torch"])
    assert repr(trace).startswith("Trace('synthetic:noise', 3000 steps")
    assert repr(result).startswith("Replayed('torch', skipped=")
    assert max(len(repr(trace)), len(repr(result)), len(repr(result.walk))) < 120


def test_only_a_trace_can_be_replayed() -> None:
    """A path or a list is answered with how to make one."""
    with pytest.raises(buoy.TraceError, match=r"buoy\.trace\.read"):
        replay("run.json", ["torch"])  # type: ignore[arg-type]


@dataclass
class Counted:
    """A state that cannot be looked up: it is not frozen."""

    scale: float


@dataclass(frozen=True)
class Brittle:
    """A policy that gives up at its first overflow."""

    wants: frozenset[str]
    precision = "float32"
    bounds = buoy.Bounds()

    def init(self, *, scale: float | None = None) -> Counted:
        return Counted(8.0 if scale is None else scale)

    def foresee(self, state: Counted, loss: float, *, ops: Any = None) -> Counted:
        return state

    def update(self, state: Counted, seen: Seen, *, ops: Any = None) -> Counted:
        if not seen.finite:
            message = "one overflow is enough"
            raise buoy.ScaleCollapsedError(message)
        return Counted(state.scale)


@pytest.mark.parametrize("wants", [frozenset(), frozenset({"amax_log2"})])
def test_a_policy_may_give_up_without_a_state(wants: frozenset[str]) -> None:
    """Then its last one counts; whether it measures, and whatever its state is."""
    trace = Trace(amax_log2=(1.0, math.inf, 1.0))
    (result,) = replay(trace, [Brittle(wants)])
    assert (result.collapsed_at, result.steps) == (1, 2)
    assert result.final_scale == 8.0


def test_a_share_of_small_gradients_is_not_shown_if_all_are_zero() -> None:
    """Nothing is left to take a share of: the scale rises as if it was not measured."""
    below = Histogram(0, -70, (1,))
    sizes = (-60.0,) * 64
    with_histogram = Trace(amax_log2=sizes, weight_histograms=(below,))
    (shown,) = replay(with_histogram, ["headroom"])
    (blind,) = replay(Trace(amax_log2=sizes), ["headroom"])
    assert list(shown.scales()) == list(blind.scales())
