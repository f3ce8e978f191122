"""The arithmetic of a step: one schedule, one decision, one clip factor everywhere."""

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import buoy
from buoy._core.advance import Found, advance
from buoy._core.ops import PLAIN, ops_of
from buoy._core.step import (
    MEASUREMENTS,
    SMALL,
    SMALL_LOG2,
    Measurement,
    bounded_norm,
    clip_factor,
    decide,
    schedule,
)
from buoy.testing import check_policy

BACKENDS = ["plain", "numpy", "torch", "jax"]
norms = st.one_of(st.floats(0.0, 3e38), st.sampled_from([math.inf, math.nan, 0.0]))


def number_of(backend, value):
    """Make a number as a backend's policies meet it."""
    if backend == "plain":
        return value
    lift = pytest.importorskip(f"buoy._backends.{backend}").lift
    return lift(value)


def test_small_gradients_are_counted_every_sixteenth_step():
    """At turns 15, 31, 47: not at the first, whose scale has found nothing yet."""
    due = [turn for turn in range(64) if MEASUREMENTS["underflow"].due(turn)]
    assert due == [15, 31, 47, 63]
    assert all(MEASUREMENTS["amax_log2"].due(turn) for turn in range(64))
    assert math.log2(SMALL) == SMALL_LOG2 == -20.0


def test_a_sparse_policy_gets_every_third_size_where_gradients_are_clipped():
    """And the first 16."""
    every = {"amax_log2", "sparse", "underflow", "loss"}
    beside = schedule(frozenset(every), clips=True)["amax_log2"]
    alone = schedule(frozenset({"amax_log2"}), clips=True)

    assert [n for n in range(37) if beside.due(n)] == [
        *range(16),
        18,
        21,
        24,
        27,
        30,
        33,
        36,
    ]
    assert alone == {"amax_log2": MEASUREMENTS["amax_log2"]}
    assert alone == schedule(frozenset({"amax_log2", "sparse"}), clips=False)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_schedule_runs_on_traced_integers(backend):
    """A count that lives on a device asks the same question."""
    turns = [number_of(backend, turn) for turn in range(9)]
    for every, phase, first, expected in (
        (4, 3, 0, [3, 7]),
        (2, 1, 0, [1, 3, 5, 7]),
        (4, 0, 3, [0, 1, 2, 4, 8]),
    ):
        due = Measurement("any", every=every, phase=phase, first=first).due
        assert [turn for turn in range(9) if due(turns[turn])] == expected


def test_every_measurement_is_a_field_of_what_a_policy_is_shown():
    """By one name: in `Policy.wants`, in `Seen`, in the table."""
    shown = {field.name for field in fields(buoy.Seen)}
    assert set(MEASUREMENTS) == shown - {"finite", "loss_finite"}
    assert all(name == made.name for name, made in MEASUREMENTS.items())


@pytest.mark.parametrize(
    ("front_end", "name", "shown"),
    [
        ("variables", "amax_log2", 16.0),
        ("variables", "underflow", 8.0),
        ("jax", "underflow", 8.0),
    ],
)
def test_a_policy_gets_the_logarithm_of_a_value_whose_name_says_so(
    front_end, name, shown, monkeypatch
):
    """A backend's table has the value, in every front end."""

    class Shown(buoy.Backoff):
        @property
        def wants(self):
            return frozenset({name})

        def update(self, state, seen, *, ops=None):
            return replace(state, scale=getattr(seen, name))

    policy = Shown()
    if front_end == "variables":
        found = Found([False], True, 1.0, 1.0)
        made = advance(
            policy, policy.init(), found, {name: 8.0}, carried=1.0, ops=PLAIN
        )
        assert made.state.scale == shown
        return
    jnp = pytest.importorskip("jax.numpy")
    optax = pytest.importorskip("optax")
    from buoy.jax import loss_scaled, scale_of
    from buoy.jax.survey import MEASURE

    monkeypatch.setitem(MEASURE, name, lambda leaves, lowered: jnp.float32(8.0))
    monkeypatch.setitem(MEASUREMENTS, name, Measurement(name))  # in every step
    tx, grads = loss_scaled(optax.sgd(0.1), policy), jnp.ones(2)
    state = tx.init(grads)
    assert scale_of(state) == 2.0**16
    assert scale_of(tx.update(grads, state)[1]) == shown


def test_the_contract_suite_offers_what_any_measurement_gives(monkeypatch):
    """A new one needs a line in the table, and a field."""

    @dataclass(frozen=True)
    class Wider(buoy.Seen):
        median_log2: Any = None
        sparsity: Any = None

    class Placing(buoy.Backoff):
        @property
        def wants(self):
            return frozenset({"median_log2", "sparsity"})

        def update(self, state, seen, *, ops=None):
            moved = super().update(state, seen, ops=ops)
            sizes.append(seen.median_log2 < 8.0)
            shares.append(seen.sparsity < 0.5)
            return moved

    sizes, shares = [], []
    monkeypatch.setattr("buoy.testing.Seen", Wider)
    for one in (Measurement("median_log2", in_log2=True), Measurement("sparsity")):
        monkeypatch.setitem(MEASUREMENTS, one.name, one)
    check_policy(Placing(), backends=("numpy",), examples=20)
    assert sizes
    assert shares


PAIRS = [
    (backend, policy)
    for backend in BACKENDS
    for policy in ("backoff", "headroom", "lognormal", "static")
    if backend != "jax" or buoy.policy(policy).precision == "float32"  # no float64
]


@pytest.mark.parametrize(("backend", "policy"), PAIRS)
def test_a_decision_is_the_same_on_every_backend(backend, policy):
    """Applied, the next scale and the factor, for a finite and a lost step."""
    made = buoy.policy(policy)
    for finite in (True, False):
        seen = buoy.Seen(finite=finite, amax_log2=3.5 if finite else math.inf)
        want = decide(
            made, made.init(), seen, inverse=0.125, norm=4.0, max_norm=1.0, ops=PLAIN
        )
        there = buoy.Seen(
            finite=number_of(backend, finite),
            amax_log2=number_of(backend, seen.amax_log2),
        )
        state = made.init()
        if backend != "plain":
            state = buoy.lift(made, state, backend)
        inverse, norm = number_of(backend, 0.125), number_of(backend, 4.0)
        got = decide(
            made,
            state,
            there,
            inverse=inverse,
            norm=norm,
            max_norm=1.0,
            ops=ops_of(inverse),
        )
        assert bool(got.applied) is want.applied is finite
        assert float(got.state.scale) == want.state.scale
        assert float(got.factor) == pytest.approx(want.factor, rel=1e-6)


@pytest.mark.parametrize("name", buoy.policies())
def test_no_policy_has_a_step_applied_that_is_not_finite(name):
    """Also those presets whose peer does not check."""
    policy = buoy.policy(name)
    seen = buoy.Seen(finite=False, amax_log2=math.inf)
    decided = decide(policy, policy.init(), seen, inverse=1.0, ops=PLAIN)
    assert decided.applied is False


@pytest.mark.parametrize(("max_norm", "factor"), [(None, 0.125), (1.0, 0.03125)])
def test_one_factor_unscales_and_clips(max_norm, factor):
    """Gradients of norm 4, clipped to 1, at a scale of 8: a thirty-second of each."""
    policy = buoy.Backoff(init_scale=8.0)
    decided = decide(
        policy,
        policy.init(),
        buoy.Seen(True),
        inverse=0.125,
        norm=4.0,
        max_norm=max_norm,
        ops=PLAIN,
    )

    assert factor == pytest.approx(decided.factor, rel=1e-6)


@given(norms, st.one_of(st.floats(0.0, 3e38), st.just(math.inf)))
def test_a_clip_factor_never_enlarges_and_is_a_number(norm, max_norm):
    """Whatever the norm is: between 0 and 1."""
    assert 0.0 <= clip_factor(norm, max_norm, PLAIN) <= 1.0
    assert clip_factor(norm, math.inf, PLAIN) == 1.0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("norm", "max_norm", "factor"),
    [
        (0.0, 1.0, 1.0),
        (0.5, 1.0, 1.0),
        (4.0, 1.0, 1.0 / 4.000001),
        (4.0, 0.0, 0.0),
        (math.inf, 1.0, 0.0),
        (math.nan, 1.0, 1.0),
        (7.0, math.inf, 1.0),
    ],
)
def test_clip_factors(backend, norm, max_norm, factor):
    """The epsilon is torch's, on every backend."""
    there = number_of(backend, norm)
    got = float(clip_factor(there, max_norm, ops_of(there)))
    assert got == pytest.approx(factor, rel=1e-6)
    if factor in {0.0, 1.0}:
        assert got == factor


@pytest.mark.parametrize(("order", "bound"), [(1.0, 12.0), (2.0, 6.0), (math.inf, 3.0)])
def test_a_norm_that_cannot_be_summed_is_bounded(order, bound):
    """By the largest element and how many there are."""
    assert bounded_norm(3.0, 4, order) == bound
