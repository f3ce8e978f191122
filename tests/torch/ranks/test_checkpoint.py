"""Checkpoints through torch.distributed.checkpoint, on another number of ranks."""

import pytest
import tasks
import torch
from crew import Crew

pytestmark = pytest.mark.slow  # starts processes


def equal(found, expected):
    """Weights of two runs, over different numbers of ranks."""
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("policy", [None, "headroom"])
def test_a_run_goes_on_with_fewer_ranks(policy, tmp_path, crew_of):
    """The state is saved by four, loaded by two; the rest is as if uninterrupted."""
    folder = str(tmp_path)
    whole = crew_of(4).run(tasks.train_and_save, folder, 0, 10, None, policy)
    rest = crew_of(2).run(tasks.train_and_save, folder, 4, 10, None, policy)

    for scales, weights in rest:
        assert whole[0][0][4:] == scales
        equal(weights, whole[0][1])


def test_a_killed_rank_ends_the_others_and_the_checkpoint_goes_on(tmp_path, crew_of):
    """An error, not a hang, then the same scale on another number of ranks."""
    folder = str(tmp_path)
    crew = Crew(4, timeout=6.0)
    try:
        crew.run(tasks.nobody_scales)  # all have started
        found = crew.outcomes(tasks.train_and_save, folder, 0, 10, 3, None)
    finally:
        crew.close()
    assert ["RuntimeError"] * 3 + ["gone"] == [
        "RuntimeError" if error.kind.endswith("Error") else error.kind
        for error in found
    ]

    resumed = crew_of(2).run(tasks.train_and_save, folder, 4, 10, None, None)
    whole = crew_of(1).run(
        tasks.train_and_save, str(tmp_path / "whole"), 0, 10, None, None
    )
    for scales, weights in resumed:
        assert whole[0][0][4:] == scales
        equal(weights, whole[0][1])
