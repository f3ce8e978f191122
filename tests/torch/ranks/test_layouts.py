"""In every layout: one decision, one scale, and the weights of an unsharded run."""

import math

import layouts
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import LAYOUTS, OPTIMIZERS, Event, Schedule

pytestmark = pytest.mark.slow  # starts processes


def events(size: int) -> st.SearchStrategy[Event | None]:
    """Draw an overflow on one rank, or that nothing happens."""
    bad = st.builds(
        Event,
        st.integers(0, size - 1),
        st.integers(0, 7),
        st.sampled_from([math.inf, -math.inf, math.nan]),
    )
    return st.one_of(st.none(), bad)


def schedules(name: str) -> st.SearchStrategy[Schedule]:
    """Draw a run for a layout."""
    layout = LAYOUTS[name]
    kinds = [kind for kind in OPTIMIZERS if layout.fused or kind != "fused"]
    return st.builds(
        Schedule,
        st.lists(events(layout.size), min_size=1, max_size=6).map(tuple),
        st.sampled_from(kinds),
        st.sampled_from([None, None, 0.1, 10.0]),
        st.booleans(),
        st.sampled_from([None, None, None, "headroom"]),
    )


@pytest.mark.parametrize("runs", [20, pytest.param(200, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_does_what_one_would(name, runs, crew_of):
    """Random schedules: overflows on any rank, at any step, in any parameter."""
    crew = crew_of(LAYOUTS[name].size)

    @settings(max_examples=runs)
    @given(schedules(name))
    def check(schedule):
        ranks = crew.run(layouts.train, name, schedule)
        expected = layouts.alone(name, schedule)
        for run in ranks:
            assert ranks[0].scales == run.scales
            assert expected.applied == run.applied
            assert_norms(expected.norms, run.norms, ranks[0].norms)
            assert run.weights
            for key, weight in run.weights.items():
                torch.testing.assert_close(
                    weight, expected.weights[key], rtol=1e-5, atol=1e-6
                )
        if schedule.policy is None:
            assert expected.scales == ranks[0].scales

    check()


def assert_norms(expected, found, first):
    """Norms are those of the unsharded run, and the same bits on every rank."""
    for wanted, norm, same in zip(expected, found, first, strict=True):
        if math.isfinite(wanted):
            assert wanted == pytest.approx(norm, rel=1e-6)
            assert same == norm
        else:
            assert not math.isfinite(norm)
