"""Real FP16 trainings: Headroom keeps the bounds of `benchmarks.headroom.judge`.

`python -m benchmarks.headroom.trainings` runs all of them; these are a few of each
kind.  The judge itself is tested on outcomes that are made up.
"""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.headroom import bad_batches
from benchmarks.headroom.judge import EXACT, STOCK, Outcome, judge
from tests import short_trainings

GOOD = Outcome(skips=3, lost=0.01, dead=0.0, loss=1.0)


def verdict(**changes):
    """Judge a policy that is like torch's rule in all but these fields."""

    def run(task, policy, seed=0, *, bad=True):
        if policy == EXACT:
            return replace(GOOD, loss=1.0 + 0.1 * seed)  # a spread of 0.2
        if policy == STOCK:
            return GOOD if bad else replace(GOOD, dead=0.5)
        return replace(GOOD, **changes)

    return judge(run, "made up", "headroom")


@pytest.mark.parametrize(
    "changes",
    [{}, {"skips": 8}, {"lost": 0.10}, {"dead": 1.4}, {"loss": 1.29}, {"loss": 0.1}],
)
def test_within_the_bounds_nothing_is_broken(changes):
    """Dead steps count from torch's rule without bad batches, losses from FP32's."""
    assert () == verdict(**changes).broken


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"skips": 9}, "skips: 9 for 3"),
        ({"lost": 0.12}, "lost: 0.12 % for 0.01 %"),
        ({"dead": 1.6}, "dead: 1.6 % for 0.5 %"),
        ({"loss": 1.31}, "loss: 1.31 for FP32's 1.1"),
        ({"loss": float("nan")}, "loss: nan"),
    ],
)
def test_each_bound_can_be_broken(changes, sentence):
    """And its sentence says by which figures."""
    broken = verdict(**changes).broken

    assert all(one.startswith(sentence) for one in broken)
    assert (1 if "loss" in changes else 3) == len(broken)


@pytest.mark.parametrize(
    ("schedule", "share"),
    [
        (bad_batches.single(bad_batches.NAN_LOSS), 0.01),
        (bad_batches.every(bad_batches.NAN_GRADIENTS), 0.02),
        (bad_batches.clusters(bad_batches.NAN_LOSS, bad_batches.INF_LOSS), 0.1),
    ],
)
def test_a_schedule_makes_its_share_of_batches_bad(schedule, share):
    """The same ones for the same seed."""
    codes = schedule(np.random.default_rng(0), 3000)

    assert np.mean(codes != bad_batches.GOOD) == pytest.approx(share, rel=0.25)
    assert (codes == schedule(np.random.default_rng(0), 3000)).all()


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        "field_fp16_summed_loss",
        "nan_loss_first_steps",
        "nan_gradients_three_in_a_row",
        "chi_square",
        "clipped",
        "two_tasks_in_turn",
    ],
)
def test_headroom_keeps_the_bounds(name):
    """Two seeds, so that there is a spread."""
    pytest.importorskip("jax")
    pytest.importorskip("optax")
    from benchmarks.headroom import trainings

    assert () == trainings.judge(name, "headroom", seeds=(0, 1)).broken


@pytest.mark.long
def test_torchs_rule_breaks_a_bound_where_gradients_are_tiny():
    """The judge notices a training that learns nothing."""
    pytest.importorskip("jax")
    pytest.importorskip("optax")
    from benchmarks.headroom import trainings

    found = trainings.judge("field_small_units", "torch", seeds=(0, 1))

    assert found.lost > 99
    assert found.broken[0].startswith("loss: ")


@pytest.mark.slow
def test_outcomes_are_taken_from_the_file_that_keeps_them(tmp_path, capsys):
    """A second run prints the same table without training."""
    pytest.importorskip("jax")
    pytest.importorskip("optax")
    from benchmarks.headroom import trainings

    command = ["clipped", "--seeds", "0", "--policy", "torch"]
    command += ["--keep", str(tmp_path / "kept")]
    trainings.main(command)
    first, size = capsys.readouterr().out, (tmp_path / "kept").stat().st_size
    trainings.main(command)

    assert first == capsys.readouterr().out
    assert size == (tmp_path / "kept").stat().st_size


@pytest.mark.slow
@pytest.mark.parametrize("changes", [*short_trainings.KINDS, {"half_weights": True}])
def test_a_training_in_torch_skips_bad_batches_alone(changes, monkeypatch):
    """At a scale at which nothing overflows; and it learns what FP32 learns."""
    pytest.importorskip("torch")
    from benchmarks.headroom import torch_trainings

    short_trainings.bad_batches_alone_are_skipped(torch_trainings, changes, monkeypatch)


@pytest.mark.slow
def test_a_training_in_torch_loses_gradients_and_overflows_in_hidden_tensors(
    monkeypatch,
):
    """All gradients at a tiny scale; at a large one, those of hidden tails first."""
    pytest.importorskip("torch")
    from benchmarks.headroom import torch_trainings

    short_trainings.gradients_are_lost(torch_trainings, monkeypatch)
    short_trainings.hidden_tails_overflow(torch_trainings, monkeypatch)
