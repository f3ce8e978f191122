"""Two stages in real FP16 do what one process would."""

import pipes

import pytest
import torch

pytestmark = pytest.mark.slow  # starts processes


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_two_stages_in_fp16_match_the_unpipelined_run(kind, crew_of):
    """Bit for bit: scales, decisions, losses and weights, overflows included."""
    scales, losses, weights = pipes.whole()
    runs = crew_of(2).run(pipes.staged, kind)

    assert len(set(scales)) > 2  # it did overflow by itself, and did recover
    for found, *_ in runs:
        assert scales == found
    assert losses == runs[1][1]
    for found, expected in zip(runs[0][2] + runs[1][2], weights, strict=True):
        assert torch.equal(found, expected)


def test_a_policy_that_looks_at_the_loss_runs_in_a_pipeline(crew_of):
    """The first stages know no loss; nobody waits for them to."""
    runs = crew_of(2).run(pipes.staged, "1f1b", "headroom")

    assert runs[0][0] == runs[1][0]


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("kind", ["interleaved", "zero bubble"])
def test_ranks_may_hold_several_stages(kind, overflow, crew_of):
    """Whatever the schedule, it is the same network."""
    norms, stages = pipes.straight(overflow)
    for found, scale, weights in crew_of(2).run(pipes.looped, kind, overflow):
        assert scale == (32.0 if overflow else 64.0)
        for step, norm in enumerate(found):
            if not (overflow and step == 1):
                assert norms[step] == pytest.approx(norm, rel=1e-6)
        for place, some in weights.items():
            torch.testing.assert_close(some, stages[place], rtol=1e-5, atol=1e-6)
