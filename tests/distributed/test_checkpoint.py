"""Checkpoints through torch.distributed.checkpoint, on another number of ranks."""

import time

import pytest
import tasks
import torch
from crew import Crew


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
    """An error within the timeout, then the same scale on another number of ranks."""
    folder, timeout = str(tmp_path), 6.0
    crew = Crew(4, timeout=timeout)
    try:
        crew.run(tasks.nobody_scales)  # all have started
        start = time.monotonic()
        found = crew.outcomes(tasks.train_and_save, folder, 0, 10, 3, None)
        took = time.monotonic() - start
    finally:
        crew.close()
    assert ["RuntimeError"] * 3 + ["gone"] == [
        "RuntimeError" if error.kind.endswith("Error") else error.kind
        for error in found
    ]
    assert took < timeout + 10.0  # of which the steps before took some

    resumed = crew_of(2).run(tasks.train_and_save, folder, 4, 10, None, None)
    whole = crew_of(1).run(
        tasks.train_and_save, str(tmp_path / "whole"), 0, 10, None, None
    )
    for scales, weights in resumed:
        assert whole[0][0][4:] == scales
        equal(weights, whole[0][1])
