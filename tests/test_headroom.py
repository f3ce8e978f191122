"""Headroom: each sentence of its rule, its golden traces, and recorded gradients."""

import math
from dataclasses import fields, replace
from importlib import import_module

import pytest
from hypothesis import given
from hypothesis import strategies as st

import buoy
from buoy import Headroom, Seen
from buoy._core.state import map_state
from buoy._core.symbols import operations, state_fields
from tests.golden import headroom as golden

pytest.importorskip("numpy")

import numpy as np

from benchmarks.headroom.compare import judge
from benchmarks.headroom.lanes import grid
from benchmarks.headroom.split import ALL, FRESH, HELD_OUT, TUNING, UNTOUCHED

SETS = {"tuned": TUNING, "held out": HELD_OUT, "later": FRESH, "last": UNTOUCHED}
POLICY = Headroom()


def started(**changes):
    """Return a state in mid-run: a peak of 2^-10, so that the level is 2^17."""
    state = POLICY.update(POLICY.init(scale=2.0**8), finite(-10.0, at=8.0))
    assert state.scale == 2.0**17
    return replace(state, **{"waited": 0.0, **changes})


def finite(size, at, **more):
    """Return a step with this unscaled size at a scale of 2^at."""
    return Seen(True, size + at, **more)


def after(state, *steps):
    """Return log2 of the scales, and the last state.

    A step is log2 of the largest unscaled gradient, "overflow" or "zero".
    """
    scales = []
    for step in steps:
        k = math.log2(state.scale)
        if step == "overflow":
            seen = Seen(False, math.inf)
        else:
            seen = Seen(True, -math.inf if step == "zero" else step + k)
        state = POLICY.update(state, seen)
        scales.append(math.log2(state.scale))
    return scales, state


# -- the rule, sentence by sentence ----------------------------------------------------


def test_the_peak_rises_at_once_and_fades_by_3_64ths():
    _, state = after(started(), -3.0)
    _, later = after(state, *[-20.0] * 256)

    assert state.peak == -3.0
    assert later.peak == -15.0


def test_a_size_is_rounded_to_sixteenths():
    """Backends differ in the last bits of a logarithm, but not in the peak."""
    for error in (-1e-6, 0.0, 1e-6):
        _, state = after(POLICY.init(), -3.0 + error)
        assert state.peak == -3.0


@pytest.mark.parametrize(("share", "margin"), [(2.0**-15, 8), (2.0**-14, 4)])
def test_the_level_keeps_the_peak_8_below_the_top_or_4_if_gradients_are_small(
    share, margin
):
    state = POLICY.update(started(), finite(-10.0, at=17.0, underflow=share))
    kept = POLICY.update(state, finite(-10.0, at=17.0, underflow=math.nan))

    assert state.margin == kept.margin == margin
    assert math.log2(state.scale) == 15 - margin + 10


def test_zero_gradients_before_any_measurement_raise_the_scale():
    """By 12 binades, while it is below 2^32."""
    scales, _ = after(POLICY.init(scale=1.0), *["zero"] * 5)

    assert scales == [12, 24, 36, 36, 36]


def test_without_a_measurement_the_scale_stays():
    """A front end may leave it out; overflows still lower the scale."""
    state = POLICY.update(POLICY.init(), Seen(finite=True))

    assert state.scale == 2.0**8
    assert POLICY.update(state, Seen(finite=False)).scale == 0.5


def test_an_overflow_leads_to_9_below_the_level_and_those_in_a_row_by_2_further():
    scales, _ = after(started(), *["overflow"] * 4)

    assert scales == [8, 6, 4, 2]


def test_an_overflow_at_the_ceiling_lowers_it_by_2():
    state = started(scale=2.0**12, ceiling=12.0, base=12.0, waited=4.0)

    assert after(state, "overflow")[0] == [10]


def test_a_ceiling_rises_after_its_patience_and_then_after_half_as_many_steps():
    state = started(scale=2.0**12, ceiling=12.0, base=12.0, patience=8.0)
    scales, _ = after(state, *[-10.0] * 18)

    assert scales == [*[12] * 7, *[13] * 4, 14, 14, 15, 16, *[17] * 3]


def test_a_ceiling_that_is_far_below_the_level_rises_half_the_way_to_9_below_it():
    state = started(scale=2.0**-9, ceiling=-9.0, base=-9.0)
    quick, _ = after(state, *[-10.0] * 5)
    slow, _ = after(replace(state, patience=4.0), *[-10.0] * 5)

    assert quick == [0, 4, 6, 7, 8]
    assert slow == [-9, -9, -9, -8, -8]


def test_an_overflow_after_a_rise_takes_it_back_and_makes_patience_longer():
    state = started(scale=2.0**14, ceiling=14.0, base=12.0, patience=2.0)
    scales, fallen = after(state, "overflow")

    assert scales == [12]
    assert fallen.patience == 64.0


def test_any_other_overflow_makes_patience_as_short_as_the_ceiling_waited():
    """Overflows that are not at a ceiling that rose may be bad data."""
    state = started(scale=2.0**12, ceiling=12.0, base=12.0, patience=64.0)
    _, soon = after(state, *[-10.0] * 5, "overflow")
    _, again = after(soon, "overflow")
    _, late = after(replace(state, waited=200.0), "overflow")

    assert (soon.patience, again.patience, late.patience) == (5.0, 1.0, 64.0)


def test_a_rise_is_taken_back_by_7_at_most():
    """From 2^0 to 2^11 in eleven steps, then an overflow."""
    state = started(scale=1.0, ceiling=0.0, base=0.0, peak=-5.0)
    risen, state = after(state, *[-5.0] * 11)
    fallen, _ = after(state, "overflow")

    assert fallen[0] == max(risen) - 7 - 1


def test_zero_gradients_wait_for_a_64th_of_the_patience_and_raise_the_ceiling_by_12():
    state = started(scale=2.0**-22, ceiling=-22.0, base=-22.0, patience=1024.0)
    scales, _ = after(state, *["zero"] * 17)

    assert scales == [*[-22] * 15, -10, 2]


def test_an_overflow_soon_after_the_ceiling_moved_leads_far_down():
    """Before it waited for 4 finite steps."""
    state = started(scale=2.0**14, ceiling=14.0, base=14.0, patience=64.0)
    soon, _ = after(state, *[-10.0] * 3, "overflow")
    later, _ = after(state, *[-10.0] * 4, "overflow")

    assert soon == [*[14] * 3, 8]
    assert later == [*[14] * 4, 12]


any_state = st.builds(
    lambda *values: replace(POLICY.init(), **dict(zip(FIELDS, values, strict=True))),
    st.integers(-24, 64).map(lambda k: 2.0**k),
    st.integers(-600, 600).map(lambda n: n / 16),
    st.sampled_from([4.0, 8.0]),
    st.integers(-24, 64).map(float),
    st.integers(-24, 64).map(float),
    st.sampled_from([1.0, 32.0, 1024.0]),
    st.integers(-8, 50).map(float),
)
FIELDS = [field.name for field in fields(POLICY.init())]


@given(any_state, st.booleans(), st.floats(-40, 16), st.floats(0, 1))
def test_a_step_whose_loss_was_not_finite_changes_nothing(state, usable, size, share):
    """Whatever its gradients; where it is not known, the step counts."""
    seen = Seen(usable, size, share, loss_finite=False)
    told, untold = replace(seen, loss_finite=True), replace(seen, loss_finite=None)

    assert POLICY.update(state, seen) == state
    assert POLICY.update(state, told) == POLICY.update(state, untold)


@given(any_state, st.booleans(), st.floats(-40, 16), st.floats(0, 1))
def test_the_scale_is_a_power_of_two_within_its_bounds(state, usable, size, share):
    """From any state, and never above the ceiling."""
    made = POLICY.update(state, Seen(usable, size, share))

    assert POLICY.min_scale <= made.scale <= POLICY.max_scale
    assert math.frexp(made.scale)[0] == 0.5
    assert math.log2(made.scale) <= max(made.ceiling, -24)


# -- what it costs, and that it is the same everywhere ---------------------------------


def test_the_rule_is_small():
    """Seven numbers; on a device that compiles nothing, each operation is a kernel."""
    assert len(state_fields(POLICY)) == 7
    assert operations(POLICY) <= 110


@pytest.mark.parametrize("backend", ["plain", "numpy", "torch"])
def test_golden_traces_are_reproduced(backend):
    """Step by step; in JAX and TensorFlow below and in tests/keras."""
    lift = lifted(backend)
    for trace in golden.load():
        state = map_state(lift, POLICY.init(scale=2.0 ** trace["start"]))
        for event, scale in zip(trace["seen"], trace["scales"], strict=True):
            seen = Seen(*event[:3], loss_finite=event[3])
            state = POLICY.update(state, map_state(lift, seen))
            assert float(state.scale) == 2.0**scale


def lifted(backend):
    """Return how numbers get onto a backend."""
    if backend == "plain":
        return lambda value: value
    pytest.importorskip(backend)
    module = import_module(f"buoy._backends.{backend}")
    return lambda value: module.lift(value, POLICY.precision)


def test_golden_traces_are_reproduced_under_jit():
    """All traces in one scan each."""
    jax = pytest.importorskip("jax")
    from buoy._backends.jax import lift, ops, register

    register(type(POLICY.init()))

    def step(state, event):
        seen = Seen(event[0] > 0, event[1], event[2], loss_finite=event[3] > 0)
        state = POLICY.update(state, seen, ops=ops())
        return state, state.scale

    run = jax.jit(lambda state, events: jax.lax.scan(step, state, events)[1])
    for trace in golden.load():
        state = map_state(lift, POLICY.init(scale=2.0 ** trace["start"]))
        scales = run(state, np.array(trace["seen"], np.float32))
        assert np.log2(scales).tolist() == trace["scales"]


def test_the_golden_traces_are_those_of_this_rule():
    """And not of another one that was recorded by mistake."""
    assert golden.record()[3]["scales"] == golden.load()[3]["scales"]


def test_states_of_an_earlier_rule_are_refused_by_name():
    """The fields meant something else."""
    old = {"buoy": 1, "kind": "HeadroomState", "scale": 256.0, "envelope": -3.0}

    with pytest.raises(buoy.StateVersionError, match="HeadroomState was saved with"):
        buoy.decode(old)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("init_scale", 3.0),
        ("min_scale", 0.0),
        ("max_scale", math.inf),
        ("max_log2", math.nan),
    ],
)
def test_bad_settings_are_refused(field, value):
    """Each setting names its range."""
    with pytest.raises(buoy.PolicyError, match=f"`{field}` must be"):
        Headroom(**{field: value})


# -- recorded gradients ----------------------------------------------------------------


@pytest.mark.slow
def test_headroom_beats_torch_on_recorded_gradients():
    """48 traces in 12 regimes: in all means, and nearly everywhere in underflow."""
    torch, ours = grid(buoy.policy("torch"), ALL, "unseen"), grid(POLICY, ALL, "unseen")
    found = judge(ours, torch)

    assert found.regimes == found.regimes_without_more_skips
    assert found.regimes == found.regimes_with_less_underflow
    assert found.regimes == found.regimes_with_less_activation_underflow
    assert found.runs_within_a_tenth >= 0.985 * found.runs
    for label, names in SETS.items():
        rows = [ALL.index(name) for name in names]
        part = judge(ours[rows], torch[rows])
        assert part.regimes == part.regimes_without_more_skips, label


@pytest.mark.slow
@pytest.mark.parametrize("clips", [False, True])
def test_recorded_gradients_are_lost_and_skipped_rarely(clips):
    """Where gradients are clipped, two of three sizes are not measured."""
    skips, weights, activations = grid(POLICY, ALL, "unseen", clips=clips).mean((0, 1))

    assert skips <= 0.75
    assert weights <= 0.02
    assert activations <= 2.4
