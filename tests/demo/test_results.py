"""The table and the sentences: the figures decide what is said."""

import pytest

from buoy.demo.columns import COLUMNS, column_of
from buoy.demo.results import Results
from buoy.demo.train import Outcome
from buoy.demo.workloads import WORKLOADS


def results(scores, skipped=None, workloads=("field-1", "bce")):
    """Make results of invented figures: {(workload, column): score}."""
    made = Results([WORKLOADS[name] for name in workloads], list(COLUMNS.values()))
    for (workload, column), score in scores.items():
        count = (skipped or {}).get(column, 0)
        made.outcomes.append(Outcome(workload, column, 0, score, 10, count, True, 0.1))
    return made


def told(made):
    return [claim.text for claim in made.claims()]


def test_higher_and_lower_is_better_are_told_apart():
    """R^2 may not fall, a loss may not rise, by more than 2 %."""
    made = results(
        {
            ("field-1", "fp32"): 0.98, ("field-1", "torch"): 0.97,
            ("field-1", "none"): 0.95, ("bce", "fp32"): 1.0,
            ("bce", "torch"): 1.03, ("bce", "none"): 0.5,
        }
    )  # fmt: skip
    field, bce = made.workloads

    assert [True, False] == [made.as_good(field, c) for c in ("torch", "none")]
    assert [False, True] == [made.as_good(bce, c) for c in ("torch", "none")]
    assert made.as_good(field, "buoy") is None


def test_sentences_name_where_each_way_fails():
    """And where scaling makes no difference."""
    made = results(
        {
            ("field-1", "fp32"): 0.98, ("field-1", "none"): 0.98,
            ("field-1", "static 2^32"): -0.5, ("bce", "fp32"): 1.0,
            ("bce", "none"): 1.5, ("bce", "static 2^32"): 70.0,
        }
    )  # fmt: skip

    assert [
        "Training without scaling falls short of FP32 on bce.",
        "A fixed scale of 2^32 falls short of FP32 on field-1 and bce.",
        "Scaling makes no difference on field-1.",
    ] == told(made)


@pytest.mark.parametrize(
    ("score", "skips", "held", "said"),
    [
        (0.97, (3, 3), True, "is within 2 % of FP32 everywhere; 3 skipped steps"),
        (0.97, (4, 3), False, "4 skipped steps, torch's 3"),
        (0.90, (0, 3), False, "Buoy with its defaults falls short of FP32 on field-1"),
    ],
)
def test_what_is_said_of_buoy_may_turn_out_false(score, skips, held, said):
    """Too low a figure, or more skips than torch, is said as plainly."""
    made = results(
        {
            ("field-1", "fp32"): 0.98,
            ("field-1", "torch"): 0.98,
            ("field-1", "buoy"): score,
        },
        dict(zip(("buoy", "torch"), skips, strict=True)),
    )
    (claim,) = [c for c in made.claims() if c.text.startswith("Buoy")]

    assert held is claim.held
    assert said in claim.text


def test_nothing_is_said_before_fp32_is_known():
    """A comparison needs both sides."""
    assert [] == told(results({("field-1", "none"): 0.5}))


def test_a_column_of_ones_own_is_named_as_typed():
    """So that the table shows what was asked for."""
    column = column_of("backoff:init_scale=2^10", COLUMNS["buoy"].policy)

    assert "backoff:init_scale=2^10" == column.name
