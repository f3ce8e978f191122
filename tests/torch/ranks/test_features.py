"""Groups, re-runs, micro-batches and spikes: the same on all ranks."""

import feature_tasks
import pytest

pytestmark = pytest.mark.slow  # starts processes


@pytest.mark.parametrize("policy", [None, "headroom"])
@pytest.mark.parametrize("fused", [False, True])
def test_all_ranks_run_again_or_none(policy, fused, crew_of):
    """An overflow of one is cured for all; a NaN of one is skipped by all."""
    one, two = crew_of(2).run(feature_tasks.run_again, policy, fused)

    assert one == two
    attempts, applied, _ = one
    assert [True, True, True, True, False, True] == applied
    assert policy or attempts.count(2) > 1  # headroom sees it coming by the loss
    assert 1 == attempts.count(4)


@pytest.mark.parametrize("fused", [False, True])
def test_all_ranks_drop_the_same_micro_batch(fused, crew_of):
    """The recipe of the page on accumulation: one is bad on one rank."""
    one, two = crew_of(2).run(feature_tasks.micro_batches, fused)

    assert one == two
    good, applied, (_, scales) = one
    assert [4, 3, 4] == good
    assert applied
    assert [2.0**7] == scales


@pytest.mark.parametrize("fused", [False, True])
def test_joint_means_all_networks_on_all_ranks(fused, crew_of):
    """And only the scale of the one that failed falls."""
    one, two = crew_of(2).run(feature_tasks.joint, fused)

    assert one == two
    applied, (_, scales), _ = one
    assert [[True, True], [True, True], [False, False], [True, True]] == applied
    assert [2.0**8, 2.0**7] == scales


def test_a_spike_on_one_rank_is_one_for_all(crew_of):
    """The norm is that of all ranks."""
    one, two = crew_of(2).run(feature_tasks.spikes)

    assert one == two
    assert [True] * 6 + [False, True] == one[0]
    assert 1 == one[1]


@pytest.mark.parametrize("clip", [False, True])
def test_shards_are_not_judged_alone(clip, crew_of):
    """One rank would skip what the other applies, or clip by half of the norm."""
    for message in crew_of(2).run(feature_tasks.alone_with_shards, clip):
        assert "`process_group=()`" in message
