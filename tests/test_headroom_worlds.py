"""Headroom in generated worlds: bad data, and what the weights' gradients do not show.

A world says, for each step, how large the largest weight gradient and the largest
hidden tensor of the backward pass are.  A step overflows if either does; only the first
is measured.  Each world holds many runs at once, one NumPy lane for each.
"""

from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import buoy

pytest.importorskip("numpy")

import numpy as np

from benchmarks.headroom import worlds
from benchmarks.headroom.bad_batches import NAN_GRADIENTS, clusters
from benchmarks.headroom.compare import LIMIT
from benchmarks.headroom.worlds import World, fits, live, settles
from buoy._core.policies import headroom

POLICY = buoy.Headroom()
BACK = 2600  # steps after which the scale is back: docs/policies/headroom.md
RUNS = 60

few = settings(max_examples=25, phases=(Phase.explicit, Phase.generate), deadline=None)
seeds = st.integers(0, 2**32)


def alternating_above(runs, *, seed=1):
    """Generate tasks that alternate, with hidden tensors 6 binades above."""
    return worlds.alternating(runs, beside=6.0, seed=seed)


# -- bad data --------------------------------------------------------------------------


@few
@given(st.floats(0.01, 0.1), st.integers(1, 10), seeds)
def test_bad_batches_do_not_make_gradients_zero(share, longest, seed):
    """At most 1 % of the good steps; torch's rule without bad batches has none.

    Clusters of any length up to 10, up to a tenth of all steps, of gradients of 2^-40
    to 2^4; the scale that torch's rule starts at keeps all of these above 0.  Where all
    are single ones, one run of the 60 may be unlucky: a single wait has 1 % of a run.
    """
    world = worlds.bad_batches(
        clusters(NAN_GRADIENTS, share=share, longest=longest), RUNS, 2000, seed
    )
    zero = live(POLICY, world).zero.sum(0) / np.isfinite(world.hidden).sum(0)

    unlucky = 1 if longest == 1 else 0
    assert np.sum(zero > 0.01) <= unlucky


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_clusters_of_any_length_do_not_make_gradients_zero(seed):
    """In each of 500 runs of 2000 steps, a tenth of them bad."""
    world = worlds.bad_batches(clusters(NAN_GRADIENTS), 500, seed=seed)
    zero = live(POLICY, world).zero.sum(0) / np.isfinite(world.hidden).sum(0)

    assert zero.max() <= 0.01


def test_the_check_notices_a_ceiling_that_stays_low(monkeypatch):
    """With a patience that never gets shorter, zero gradients stay for long."""
    monkeypatch.setattr(headroom, "SHORT", 1024.0)
    monkeypatch.setattr(headroom, "HURRY", 1.0)
    world = worlds.bad_batches(clusters(NAN_GRADIENTS), RUNS)

    assert live(POLICY, world).zero.mean() > 0.01


@few
@given(seeds, st.integers(1, 10))
def test_zero_gradients_below_the_level_end_within_20_steps(seed, length):
    """A row of bad batches, while one step in twenty is bad anyway."""
    rng = np.random.default_rng(seed)
    size = rng.uniform(-40, 4, RUNS) + np.zeros((400, RUNS))
    above = np.where(rng.random((400, RUNS)) < 0.05, np.inf, size - 3)
    above[200 : 200 + length] = np.inf
    world = World(size, above, np.full(RUNS, 8.0), np.full(RUNS, 40.0))
    zero = live(POLICY, world).zero
    longest = current = np.zeros(RUNS)
    for step in zero[60:]:
        current = np.where(step, current + 1, 0)
        longest = np.maximum(longest, current)

    assert longest.max() <= 20


def test_a_failed_forward_pass_costs_its_step_only():
    """Ten NaN losses in a row: the scale, and all else, is as before."""
    state = POLICY.init()
    for _ in range(50):
        state = POLICY.update(state, buoy.Seen(True, 5.0, 0.0, loss_finite=True))
    before = state
    for _ in range(10):
        state = POLICY.update(state, buoy.Seen(False, np.inf, loss_finite=False))

    assert before == state


# -- hidden tensors --------------------------------------------------------------------


kinds = pytest.mark.parametrize(
    "make",
    [worlds.hidden, worlds.alternating, worlds.hidden_tasks, alternating_above],
)


@pytest.mark.slow
@kinds
@pytest.mark.parametrize("seed", range(5))
def test_a_scale_that_fits_is_found_and_others_are_tried_rarely(make, seed):
    """Ten skips at most, and then one in 500 steps, in 95 % of the runs of a kind."""
    world = make(500, seed=seed)
    skipped = live(POLICY, world).skipped[:, fits(world)]

    assert np.mean([settles(run) for run in skipped.T]) >= 0.95
    assert np.mean(skipped[:400].sum(0) <= 10) >= 0.95


@pytest.mark.slow
@kinds
@pytest.mark.parametrize("seed", range(5))
def test_at_most_one_step_in_twenty_is_lost_where_no_scale_fits(make, seed):
    """The scale that lets the gradients through overflows elsewhere."""
    world = make(500, seed=seed)
    skips = live(POLICY, world).skipped[:, ~fits(world)].sum(0)

    assert skips.max(initial=0) <= 2000 / 20


def test_worlds_settle_only_because_patience_grows(monkeypatch):
    """The checks above notice a rule whose ceiling never waits."""
    monkeypatch.setattr(headroom, "LONGER", 1.0)
    world = worlds.hidden(RUNS)
    skipped = live(POLICY, world).skipped[:, fits(world)]

    assert np.mean([settles(run) for run in skipped.T]) < 0.8


@few
@given(seeds, st.sampled_from(["spikes", "nan", "noise", "jump", "hidden", "zeros"]))
def test_the_scale_comes_back_once_the_world_stands_still(seed, trouble):
    """Within the margin of the largest that fits, to a 16th, and it stays there."""
    rng = np.random.default_rng(seed)
    size = rng.uniform(-40, 4, RUNS)
    above = size + rng.choice([-np.inf, -3.0, 6.0, 20.0], RUNS)
    visible = size + np.zeros((600 + BACK + 200, RUNS))
    hidden = above + np.zeros_like(visible)
    early, now = visible[:600], rng.random((600, RUNS))
    if trouble == "spikes":
        early += np.where(now < 0.02, rng.uniform(3, 14, early.shape), 0)
    elif trouble == "nan":
        hidden[:600] = np.where(now < 0.3, np.inf, above)
    elif trouble == "noise":
        early += 3 * rng.standard_normal(early.shape)
    elif trouble == "jump":
        early += 13
    elif trouble == "hidden":
        hidden[:600] = LIMIT + 10
    else:
        early[:] = -np.inf
    start, spread = rng.integers(-24, 65, RUNS), rng.choice([8.0, 20.0, 40.0], RUNS)
    world = World(visible, hidden, start.astype(float), spread)
    scales = live(POLICY, world).scales[600 + BACK :]
    fitting = np.minimum(np.floor(LIMIT - np.maximum(size, above) - 1 / 16), 64)

    assert (scales.min(0) >= fitting - headroom.WIDE).all()


@few
@given(seeds, st.integers(0, 300), st.integers(1, 800))
def test_after_zero_gradients_the_first_real_ones_cost_few_skips(seed, before, zeros):
    """At the start and in mid-run; meanwhile the level rises, up to a scale of 2^32."""
    rng = np.random.default_rng(seed)
    visible = rng.uniform(-40, 6, RUNS) + np.zeros((before + zeros + 100, RUNS))
    visible[before : before + zeros] = -np.inf
    start = rng.integers(-24, 33, RUNS).astype(float)
    world = World(visible, visible - 3.0, start, np.full(RUNS, 40.0))
    skipped = live(POLICY, world).skipped

    assert skipped[before + zeros :].sum(0).max() <= 5 + zeros / 40


def test_a_drift_both_ways_costs_nothing():
    """Down by 20 binades and up again, at the pace of the peak's fading and slower."""
    drift = np.concatenate([np.linspace(0, -20, 400), np.linspace(-20, 0, 400)])
    visible = drift[:, None] + np.linspace(-15, 0, RUNS)
    world = World(visible, visible - 3, np.full(RUNS, 8.0), np.full(RUNS, 40.0))
    lived = live(POLICY, replace(world, start=np.floor(7 - visible[0])))

    assert not lived.skipped.any()
    assert (LIMIT - visible - lived.scales)[20:].max() <= headroom.WIDE + 2
