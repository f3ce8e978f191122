"""Policies: configuration is checked, rules hold for every history."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import buoy
from buoy import Backoff, LogNormal, NoScaling, Seen, Static
from buoy._core.policies.presets import PeerBackoff, Quirks

BAD = [
    (Backoff, "init_scale", math.nan),
    (Backoff, "init_scale", 0.0),
    (Backoff, "init_scale", -3.0),
    (Backoff, "init_scale", math.inf),
    (Backoff, "init_scale", "65536"),
    (Backoff, "init_scale", True),
    (Backoff, "init_scale", 2.0**100),
    (Backoff, "init_scale_power", "16"),
    (Backoff, "growth_factor", 1.0),
    (Backoff, "growth_factor", 0.5),
    (Backoff, "growth_factor", math.nan),
    (Backoff, "backoff_factor", 1.0),
    (Backoff, "backoff_factor", 0.0),
    (Backoff, "backoff_factor", -1.0),
    (Backoff, "growth_interval", 0),
    (Backoff, "growth_interval", 2.5),
    (Backoff, "growth_interval", "2000"),
    (Backoff, "min_scale", 0.0),
    (Backoff, "min_scale", -1.0),
    (Backoff, "max_scale", math.inf),
    (Backoff, "max_scale", math.nan),
    (Backoff, "hysteresis", 0),
    (Backoff, "hysteresis_refill", "never"),
    (Backoff, "tolerance", 1.5),
    (Backoff, "tolerance", -0.1),
    (PeerBackoff, "growth_step", 0.0),
    (Backoff, "min_scale", 1e-50),
    (Backoff, "max_scale", 1e300),
    (Backoff, "growth_factor", 1 + 1e-12),
    (Backoff, "backoff_factor", 1 - 1e-12),
    (Backoff, "init_scale", 10**400),
    (PeerBackoff, "quirks", None),
    (buoy.Headroom, "max_log2", "abc"),
    (Static, "init_scale", 1e300),
    (Static, "init_scale", 0.0),
    (LogNormal, "mean_decay", 1.0),
    (LogNormal, "variance_decay", 0.0),
    (LogNormal, "deviations", -1.0),
    (LogNormal, "skip_zero", "yes"),
    (LogNormal, "init_scale", 2.0**99),
    (Quirks, "arithmetic", "half"),
    (Quirks, "at_min", "stop"),
    (Quirks, "growth_delay", -1),
]


@pytest.mark.parametrize(("kind", "field", "value"), BAD)
def test_bad_configuration_names_field_value_and_range(kind, field, value):
    """A value that cannot work is refused, with the field, the value and the range."""
    with pytest.raises(buoy.PolicyError) as caught:
        kind(**{field: value})

    message = str(caught.value)
    assert f"`{field}`" in message
    assert repr(value) in message
    assert "must be" in message


def test_bounds_in_the_wrong_order_are_refused():
    """A floor above the ceiling names both."""
    with pytest.raises(buoy.PolicyError, match="`min_scale`.*`max_scale`.*8.0.*4.0"):
        Backoff(min_scale=8.0, max_scale=4.0, init_scale=4.0)


def test_policy_error_is_a_value_error():
    """Callers may catch the builtin that they would expect."""
    with pytest.raises(ValueError, match="growth_factor"):
        Backoff(growth_factor=1)


def test_init_scale_power_sets_the_scale():
    """`init_scale_power` is log2 of `init_scale`, and survives `replace`."""
    policy = Backoff(init_scale_power=10)

    assert 1024.0 == policy.init_scale
    assert 1024.0 == dataclasses.replace(policy, growth_interval=5).init_scale


@pytest.mark.parametrize("policy", [Backoff(), Static(), NoScaling(), LogNormal()])
def test_policies_are_frozen_values(policy):
    """Equal configuration makes equal, hashable policies that cannot be changed."""
    assert policy == type(policy)()
    assert hash(policy) == hash(type(policy)())
    for field in dataclasses.fields(policy):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(policy, field.name, 3.0)


def run(policy, events):
    """Give the scale after each event, 1 = finite."""
    state = policy.init()
    scales = []
    for event in events:
        state = policy.update(state, Seen(finite=event == "1"))
        scales.append(state.scale)
    return scales


def test_scale_and_power_together_are_refused():
    """Two answers to one question are an error, not a guess."""
    with pytest.raises(buoy.PolicyError, match="not both"):
        Backoff(init_scale=8.0, init_scale_power=10)


def test_metaseq_clamps_to_its_threshold_before_it_holds():
    """Its threshold is a floor of its own; below `min_loss_scale` the scale stays."""
    floor = buoy.policy("metaseq", threshold=5.0)
    held = buoy.policy("metaseq", threshold=1.0, min_loss_scale=3.0)

    assert 5.0 == floor.update(floor.init(), Seen(finite=False)).scale
    assert 4.0 == held.update(held.init(), Seen(finite=False)).scale


def test_a_peers_start_may_lie_outside_its_bounds():
    """ColossalAI starts where it is told and clamps when it moves."""
    policy = buoy.policy("colossalai", min_scale=1.0, max_scale=500.0, hysteresis=1)

    assert 65536.0 == policy.init().scale
    assert 32768.0 == policy.update(policy.init(), Seen(finite=False)).scale


def test_hysteresis_means_what_each_refill_says():
    """The four meanings of `hysteresis=2` differ exactly as their owners' do."""
    common = {"growth_interval": 10, "hysteresis": 2}
    alternating = {
        "growth": [16, 16, 15, 15, 14, 14, 13, 13],
        "clean": [16] * 8,
        "change": [16, 16, 15, 15, 15, 15, 14, 14],
        "clean_or_change": [16] * 8,
    }
    in_a_row = {
        "growth": [16, 15, 14, 13, 12],
        "clean": [16, 15, 14, 13, 12],
        "change": [16, 15, 15, 14, 14],
        "clean_or_change": [16, 15, 15, 14, 14],
    }
    for refill, expected in alternating.items():
        policy = Backoff(hysteresis_refill=refill, **common)

        assert expected == [math.log2(s) for s in run(policy, "01010101")]
        assert in_a_row[refill] == [math.log2(s) for s in run(policy, "00000")]


def test_tolerance_keeps_the_scale_while_overflows_are_rare():
    """One overflow in ten is tolerated at 20 percent; three in a row are not."""
    policy = Backoff(tolerance=0.2, growth_interval=1000)

    assert [65536.0] * 10 == run(policy, "1111111110")
    assert 32768.0 == run(policy, "111111111000")[-1]


def test_growth_by_step_adds_to_the_logarithm():
    """guided-diffusion multiplies by 2^step each time; an overflow still halves."""
    start = {"initial_lg_loss_scale": 0.0, "fp16_scale_growth": 0.5}
    policy = buoy.policy("guided_diffusion", **start)

    assert [2.0**0.5, 2.0, 1.0] == run(policy, "110")


def test_a_scale_never_leaves_its_bounds():
    """After any number of overflows or clean steps the scale rests at its bound."""
    policy = Backoff(growth_interval=1, min_scale=0.5, max_scale=2.0**20)

    assert 0.5 == run(policy, "0" * 300)[-1]
    assert 2.0**20 == run(policy, "1" * 300)[-1]


@given(st.text("01", max_size=300), st.integers(1, 5), st.integers(1, 3))
def test_power_of_two_factors_keep_the_scale_a_power_of_two(events, interval, patience):
    """With factors 2 and 1/2 no history yields another mantissa."""
    policy = Backoff(growth_interval=interval, hysteresis=patience)

    assert all(math.frexp(scale)[0] == 0.5 for scale in run(policy, events))


def test_lognormal_recovers_from_an_overflow():
    """One overflow after a quiet while lowers the scale a little, not to the floor."""
    policy = LogNormal()
    state = policy.init()
    for _ in range(200):
        state = policy.update(
            state, Seen(finite=True, amax_log2=-8.0 + math.log2(state.scale))
        )
    before = state.scale
    state = policy.update(state, Seen(finite=False, amax_log2=math.inf))
    at_overflow = state.scale
    for _ in range(50):
        state = policy.update(
            state, Seen(finite=True, amax_log2=-8.0 + math.log2(state.scale))
        )

    assert before / 2**6 < at_overflow <= before / 2
    assert state.scale > before / 2**6


def test_lognormal_ignores_steps_that_say_nothing():
    """All-zero, NaN and unmeasured gradients leave the state as it is."""
    policy = LogNormal()
    state = policy.update(policy.init(), Seen(finite=True, amax_log2=1.0))

    for amax in (-math.inf, math.nan, None):
        assert state == policy.update(state, Seen(finite=True, amax_log2=amax))


def test_giving_up_carries_the_state_to_go_on_from():
    """A preset that stops the run raises an arithmetic error that loses nothing."""
    policy = buoy.policy("deepspeed", init_scale=1.0, delayed_shift=1)

    with pytest.raises(ArithmeticError, match="stops instead of lowering it") as caught:
        policy.update(policy.init(), Seen(finite=False))

    assert 1.0 == caught.value.state.scale
    assert policy.update(caught.value.state, Seen(finite=True)).scale == 1.0


def test_steps_of_the_logarithm_stop_at_the_bounds():
    """Where a preset adds to the logarithm and clamps, the scale rests at its bound."""
    policy = PeerBackoff(
        init_scale=8.0,
        growth_step=1.0,
        growth_interval=1,
        min_scale=4.0,
        max_scale=16.0,
    )

    assert [16.0, 16.0, 8.0, 4.0, 4.0] == run(policy, "11000")


def test_torchs_rule_does_not_look_at_the_loss():
    """It may be asked to, as any policy."""
    policy = buoy.policy("torch")
    state = policy.init()

    assert state == policy.foresee(state, 1e30)
