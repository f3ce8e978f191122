"""Real FP16 trainings: Headroom skips no more than torch's rule, by more than 3 steps.

`python -m benchmarks.headroom.trainings` runs all of them; these are the kinds that
once broke it.
"""

import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")

from benchmarks.headroom.trainings import run


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["field_fp16_summed_loss", "field_small_units", "chi_square", "two_tasks_in_turn"],
)
def test_it_skips_no_more_than_torchs_rule(name):
    """And loses no gradients where torch's rule loses none."""
    skips, lost, error = run(name, "headroom")
    most, allowed, torchs_error = run(name, "torch")

    assert skips <= most + 3
    assert lost <= max(allowed, 1e-2)
    assert error <= 1.1 * torchs_error
