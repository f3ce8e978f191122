"""Verdicts: what losses say about a skip, and how it is put into words."""

import math
from pathlib import Path

import pytest

from buoy._core.verdicts import VERDICTS, Verdict, judge_losses

ONES = [1.0] * 4


@pytest.mark.parametrize(
    ("now", "before", "verdict"),
    [
        ([math.nan], ONES, "forward_nonfinite"),
        ([1.0, -math.inf], [], "forward_nonfinite"),
        ([], ONES, "scale_too_high"),
        ([9.0], ONES[1:], "scale_too_high"),  # too few to compare with
        ([9.0], [*ONES[1:], math.inf], "scale_too_high"),
        ([8.0], ONES, "scale_too_high"),
        ([8.5], ONES, "bad_batch"),
        ([-8.5], [-1.0] * 4, "bad_batch"),
        ([1.0, 8.5, 1.0], ONES, "bad_batch"),  # the largest counts
        ([79.0], [10.0, 1.0, 10.0, 1.0], "scale_too_high"),  # the upper median is 10
        ([81.0], [10.0, 1.0, 10.0, 1.0], "bad_batch"),
        ([1e-29], [0.0] * 4, "bad_batch"),
        ([4e-30], [0.0] * 4, "scale_too_high"),  # as good as zero
        ([6.0], [1.0, 2.0, 3.0, 5.0], "divergence"),
        ([6.0], [5.0, 1.0, 2.0, 3.0, 5.0], "divergence"),  # the last five count
        ([6.0], [1.0, 2.0, 3.0, 4.0], "scale_too_high"),  # not far enough before it
        ([6.0], [2.0, 3.0, 4.0, 5.0], "scale_too_high"),
        ([6.0], [1.0, 2.0, 2.0, 5.0], "scale_too_high"),  # not at every step
        ([6.0], [1.0, 3.0, 2.0, 5.0], "scale_too_high"),
    ],
)
def test_a_skip_is_judged_by_its_losses(now, before, verdict):
    """Not finite, rising for five steps, 8 times the median; else it was the scale."""
    assert verdict == judge_losses(now, before)


def test_a_verdict_without_a_remedy_is_one_sentence():
    """Others have two."""
    without, spoiled = VERDICTS[Verdict.NO_GRADS], VERDICTS[Verdict.POISONED]
    assert "no parameter had a gradient" == without.text
    assert "No parameter had a gradient." == without.sentences
    assert spoiled.text.endswith("already inf or NaN; go back to a checkpoint")
    assert spoiled.sentences.endswith("already inf or NaN. Go back to a checkpoint.")


GUIDE = Path(__file__).parents[1] / "docs/guides/skipped-steps.md"


@pytest.mark.parametrize("verdict", [one for one in Verdict if one != "applied"])
def test_a_verdict_has_a_meaning_and_a_row_in_the_guide(verdict):
    """Who adds one reads here what is missing."""
    assert VERDICTS[verdict].seen
    assert f"\n| `{verdict}` | " in GUIDE.read_text(), f"no row for {verdict}"
