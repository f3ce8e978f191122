"""Clipping gradients that are still scaled is noticed on several ranks, too."""

import clip_tasks
import pytest

pytestmark = pytest.mark.slow  # starts processes

POLICIES = [None, "backoff", "headroom", "lognormal"]


@pytest.mark.parametrize("parallel", ["no", "ddp", "ddp, views"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("size", [1, 2])
def test_every_rank_is_told_in_the_third_step(size, policy, parallel, crew_of):
    """With a process group of one rank, and of two."""
    found = crew_of(size).run(clip_tasks.train, policy, parallel, "all", False)
    for told, scales in found:
        assert len(told) == 1
        assert told[0] <= 4
        held = scales[told[0] - 1 :]
        assert held == sorted(held, reverse=True)
        assert scales == found[0][1]


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("policy", ["headroom", "lognormal"])
def test_all_ranks_hold_the_scale_if_one_clips(policy, hidden, crew_of):
    """As in a pipeline, where each rank clips its own parameters."""
    (told, scales), (other, same) = crew_of(2).run(
        clip_tasks.train, policy, "no", "one", hidden
    )
    assert len(told) == 1
    assert other == []
    assert scales == same
    held = scales[told[0] - 1 :]
    assert held == sorted(held, reverse=True)


@pytest.mark.parametrize("who", ["nobody", "nobody, averaged", "nobody, unscaled"])
@pytest.mark.parametrize("parallel", ["no", "ddp", "ddp, views"])
@pytest.mark.parametrize("size", [1, 2])
def test_honest_ranks_are_told_nothing(size, parallel, who, crew_of):
    for policy in POLICIES:
        for told, _ in crew_of(size).run(
            clip_tasks.train, policy, parallel, who, False
        ):
            assert told == []
