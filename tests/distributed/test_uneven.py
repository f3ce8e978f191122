"""Ranks that run out of data before others, and torch's own `Join`."""

import pytest
import torch
import uneven
from crew import Crew


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    ("kind", "policy"), [("sgd", None), ("fused", None), ("sgd", "headroom")]
)
def test_ranks_without_data_hold_the_same_scale(kind, policy, parts, clip, crew_of):
    """They follow the others, an overflow among them, to the same state."""
    runs = crew_of(3).run(uneven.uneven, kind, policy, clip, parts, [3, 8, 5])

    _, held, weights, after = runs[0]
    for _, other, copies, later in runs[1:]:
        assert held == other
        assert all(map(torch.equal, weights, copies))
        assert after == later
    assert 8 == held["turn"]
    assert after[0]
    assert [] == after[2]
    if policy is None:  # 64 grew after 3 and 6, fell at 7, and counts again
        assert (128.0, 1) == (held["scale"], held["_growth_tracker"])


def test_the_norm_is_that_of_who_is_left(crew_of):
    """A replica that has no data left is not counted as one of nothing."""
    runs = crew_of(3).run(uneven.uneven, "sgd", None, True, 1, [2, 6, 4])

    for norm, true in runs[1][0]:
        assert norm == pytest.approx(true, rel=1e-6)


def test_a_rank_may_have_no_data_at_all(crew_of):
    """Then it takes part in plain steps."""
    runs = crew_of(2).run(uneven.uneven, "sgd", None, False, 1, [0, 4])

    assert runs[0][1] == runs[1][1]
    assert 4 == runs[0][1]["turn"]


@pytest.mark.parametrize(
    ("kind", "counts"),
    [
        ("clipped", [0, 5, 3]),
        ("a bad start", [1, 5, 3]),
        ("two losses", [2, 5, 3]),
        ("a group apart", [2, 5, 3]),
        ("by hand", [2, 5, 3]),
        ("a sharded optimizer", [2, 5, 3]),
    ],
)
def test_what_the_others_do_need_not_be_known(kind, counts, crew_of):
    """Clipping is announced; forward passes are counted, not losses."""
    runs = crew_of(3).run(uneven.odd, kind, counts)

    _, held, after = runs[0]
    assert 5 == held["turn"]
    for pairs, other, later in runs:
        assert (held, after) == (other, later)
        for norm, true in pairs[1:] if kind == "a bad start" else pairs:
            assert true == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize(
    "counts", [[[4, 8]], [[3, 8]], [[4, 8], [0, 4]], [[4, 8], [1, 4]]]
)
def test_data_may_end_within_a_window(counts, crew_of):
    """And a rank that has none in one epoch goes by what it did in another."""
    one, two = crew_of(2).run(uneven.windows, counts)

    assert one == two
    assert sum(max(epoch) for epoch in counts) // 2 == one["turn"]


def test_nobody_is_followed_where_the_first_end_ends_all(crew_of):
    """So a policy is shown losses as always."""
    for message, uneven_still, listeners in crew_of(2).run(uneven.ended_early):
        assert "exhausted" in message
        assert not uneven_still
        assert [] == listeners


def test_an_exception_leaves_nothing_behind(crew_of):
    """Nobody tells the scaler that `Join` is over then."""
    assert [0, 0] == crew_of(2).run(uneven.broken_off)


def test_what_cannot_be_followed_is_refused(crew_of):
    """A guard's statistics would part from those of the other ranks."""
    for message in crew_of(2).run(uneven.not_followed):
        assert "spike guard" in message


def test_a_scaler_that_join_does_not_know_names_who_is_absent():
    """No hang and no crash: an error that tells the cure, and nothing applied."""
    crew = Crew(2, timeout=2.0)
    try:
        _, told = crew.outcomes(uneven.unnamed)
    finally:
        crew.close()

    kind, absent, message, kept = told
    assert "AbsentRankError" == kind
    assert (0,) == absent
    assert "Join([model, scaler])" in message
    assert kept


def test_the_model_is_named_first(crew_of):
    """It is the model that announces an iteration."""
    for message in crew_of(2).run(uneven.misnamed):
        assert "Join([model, scaler])" in message


def test_a_shared_step_is_not_compiled(crew_of):
    """The compiler would leave the other ranks out; the error says what to do."""
    for message in crew_of(2).run(uneven.compiled):
        assert "other ranks take part in" in message
