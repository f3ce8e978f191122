"""Tuning: the best static scale and settings, and an honest word on how sure."""

import math
from dataclasses import replace

import pytest

import buoy
import buoy.trace
from buoy import Backoff, Static, replay, tune
from buoy.trace import Histogram, Trace


def lost(trace: Trace, exponent: int) -> float:
    """Return what a static scale loses, the slow way."""
    (result,) = replay(trace, [Static(init_scale=2.0**exponent)])
    share = result.skipped / result.steps
    return share + (1.0 - share) * (result.weight_underflow or 0.0)


@pytest.mark.parametrize("kind", buoy.trace.KINDS)
def test_no_static_scale_loses_less_than_the_best(kind: str) -> None:
    """Every other power of two, replayed, loses at least as much."""
    trace = buoy.trace.synthetic(kind, steps=800, seed=1)
    best = tune(trace).static
    losses = {exponent: lost(trace, exponent) for exponent in range(-5, 50)}
    assert best.loss == pytest.approx(losses[best.exponent], abs=1e-12)
    assert best.loss <= min(losses.values()) + 1e-6
    assert losses[best.lowest] <= best.loss + 2e-6
    assert losses[best.highest] <= best.loss + 2e-6
    assert best.lowest <= best.exponent <= best.highest
    assert best.interval[0] <= best.interval[1]


def test_the_middle_of_equally_good_scales_is_advised() -> None:
    """Where nothing is lost over a range, the margin is the same on both sides."""
    trace = Trace(
        amax_log2=(0.0,) * 400, weight_histograms=(Histogram(0, -20, (1,) * 20),)
    )
    best = tune(trace).static
    assert (best.lowest, best.highest) == (-5, 15)
    assert (best.exponent, best.loss, best.sureness) == (5, 0.0, "sure")


def test_the_largest_safe_scale_keeps_to_the_share_of_skips() -> None:
    """One spike in a thousand steps is allowed or not, as was asked."""
    trace = Trace(amax_log2=(0.0,) * 999 + (10.0,))
    assert tune(trace, max_skipped=1e-3).static.largest_safe == 15
    assert tune(trace, max_skipped=0.0).static.largest_safe == 5


def test_steps_that_overflow_at_any_scale_do_not_sway_the_choice() -> None:
    """NaN in the forward pass is no reason for a lower scale."""
    sizes = (0.0, 1.0, -1.0, 0.5) * 100
    clean = tune(Trace(amax_log2=sizes)).static
    dirty = tune(Trace(amax_log2=sizes + (math.nan, math.inf) * 4)).static
    assert clean.exponent == dirty.exponent == 14
    assert clean.largest_safe == dirty.largest_safe


def test_short_traces_are_never_sure() -> None:
    """A handful of steps cannot be resampled into certainty."""
    assert tune(Trace(amax_log2=(1.0,))).static.sureness == "unsure"
    assert tune(Trace(amax_log2=(1.0,) * 40)).static.sureness == "unsure"


def test_the_objective_without_histograms_is_named() -> None:
    """What underflows is unknown there, and the result says what was used instead."""
    trace = buoy.trace.synthetic("noise", steps=400)
    assert tune(trace).objective == "skipped+underflow"
    bare = replace(trace, weight_histograms=(), activation_histograms=())
    assert tune(bare).objective == "skipped+binades"


def test_a_trace_without_gradients_is_refused() -> None:
    """Nothing but zeros and NaN has no best scale."""
    with pytest.raises(buoy.TraceError, match="nothing to tune"):
        tune(Trace(amax_log2=(-math.inf, math.nan)))


def test_a_setting_that_matters_is_found_and_sure() -> None:
    """On a falling level a shorter interval is better, beyond doubt."""
    trace = buoy.trace.synthetic("drift_down", steps=4000)
    tries = {"growth_interval": [100, 2000]}
    (best,) = tune(trace, ["torch"], tries=tries).policies
    assert best.settings == {"growth_interval": 100}
    assert best.loss < best.given_loss
    assert best.gain > 0.0
    assert best.gain_interval[0] > 0.0
    assert (best.sureness, best.tried, best.alike) == ("sure", 2, 1)


def test_a_setting_that_does_not_matter_is_not_sold_as_better() -> None:
    """On a steady level all intervals are alike, and the given one is kept."""
    trace = Trace(
        amax_log2=(-20.0,) * 1000, weight_histograms=(Histogram(0, -22, (1, 1)),)
    )
    tries = {"growth_interval": [400, 1500, 2000]}
    (best,) = tune(trace, ["torch"], tries=tries).policies
    assert best.settings == {}
    assert best.sureness == "unsure"
    assert best.alike == best.tried == 3


def test_given_parameters_stay() -> None:
    """What is fixed is not tried, whichever way the policy is given."""
    trace = buoy.trace.synthetic("noise", steps=300)
    named, made = tune(
        trace,
        [("torch", {"growth_interval": 7}), Backoff(growth_interval=7)],
        tries={"growth_interval": [5], "backoff_factor": [0.25]},
    ).policies
    assert "growth_interval" not in named.settings
    assert (named.name, named.tried) == ("torch", 2)
    assert (made.name, made.tried) == ("Backoff", 2)


def test_presets_are_tuned_under_their_own_parameter_names() -> None:
    """What comes out can be given to the preset again."""
    trace = buoy.trace.synthetic("drift_down", steps=1000)
    (best,) = tune(trace, ["deepspeed"]).policies
    assert best.settings
    assert buoy.policy("deepspeed", **best.settings)


def test_values_that_do_not_fit_are_refused_by_the_policy() -> None:
    """A parameter that the policy has not is an error, not a silent nothing."""
    trace = buoy.trace.synthetic("noise", steps=100)
    with pytest.raises(buoy.PolicyError, match="no parameter `wings`"):
        tune(trace, ["torch"], tries={"wings": [2]})
    with pytest.raises(buoy.PolicyError, match="wings"):
        tune(trace, [Backoff()], tries={"wings": [2]})


def test_a_policy_that_gives_up_has_lost_the_rest() -> None:
    """Steps that were never reached count as lost."""
    trace = Trace(amax_log2=(0.0,) * 16 + (math.nan,) * 64 + (0.0,) * 80)
    (best,) = tune(trace, ["fairseq"], tries={"scale_window": [2000]}).policies
    assert best.given_loss == pytest.approx(144 / 160)


def test_tuning_is_repeatable() -> None:
    """The same trace and seed give the same answer."""
    trace = buoy.trace.synthetic("spikes", steps=500)
    assert tune(trace, ["torch"], seed=5) == tune(trace, ["torch"], seed=5)


def test_long_traces_are_cut_for_policies_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The work is bounded; the result names the steps that were used."""
    monkeypatch.setattr("buoy._core.replay.tune._MOST_STEPS", 1000)
    trace = buoy.trace.synthetic("spikes", steps=2000)
    (best,) = tune(trace, ["torch"], tries={"growth_interval": [100]}).policies
    assert best.steps == 500
    (best,) = tune(trace, "headroom", tries={"max_log2": [14.0]}).policies
    assert best.steps == 125  # one that measures takes four times as long
