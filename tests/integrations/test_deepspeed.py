"""DeepSpeed: ZeRO 1, 2, 3 in both FP16 modes end like runs without the bad batches."""

import pytest
import torch
from ranks import run_ranks
from tiny import BAD, STEPS

from buoy.integrations import deepspeed as ours
from buoy.torch import OptionError

pytest.importorskip("deepspeed")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Run all cases on two ranks."""
    return run_ranks("zero.py", tmp_path_factory.mktemp("zero"))


CASES = [
    f"{s} {mode} {c}"
    for s in (1, 2, 3)
    for mode in ("fp16", "autocast")
    for c in (0.0, 0.5)
]
CASES = [f"skips {case}" for case in (*CASES, "0 autocast 0.5")]


@pytest.mark.parametrize("case", [*CASES, "accumulated fp16", "accumulated autocast"])
def test_weights_lr_and_counters_do_not_see_skipped_steps(ranks, case):
    """The scale grows every second step, and falls at each overflow, of rank 1."""
    for found in (rank[case] for rank in ranks):
        assert found["apart"] == 0.0  # from the same engine without the bad batches
        assert found["plain"] <= 1e-3  # from a loop without DeepSpeed
        assert found["moved"] > 0.1
        assert found["lr"][0] == found["lr"][1] == found["lr"][2]
        assert found["skipped"] == len(BAD)
        assert found["dtypes"] == ["torch.float16"]
        scales = [2.0**power for power in (8, 8, 9, 9, 8, 8, 9, 9, 8, 8, 9, 9)]
        assert [one["buoy/scale"] for one in found["logs"]] == scales
        skipped = [float(sum(bad <= step for bad in BAD)) for step in range(STEPS)]
        assert [one["buoy/skipped"] for one in found["logs"]] == skipped
        if "skips 0" not in case:
            norms = ["buoy/norm" in one for one in found["logs"]]
            assert norms == [step not in BAD for step in range(STEPS)]


@pytest.mark.parametrize("mode", ["fp16", "autocast"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_run_resumes_exactly(ranks, stage, mode):
    """With the policy of the checkpoint, and the scaler that `use` returned."""
    for found in (rank[f"resume {stage} {mode}"] for rank in ranks):
        assert found["apart"] == 0.0
        assert found["same"]
        assert found["states"][0] == found["states"][1]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint_without_buoy_gives_its_scale(ranks, stage):
    """And leaves our scaler in its place."""
    for found in ranks:
        assert found[f"stock {stage}"] == {"scale": 2.0**5, "same": True}


def test_an_engine_that_accelerate_prepared(ranks):
    """Accelerate's own `use` refuses, and names the way that is tried here."""
    for found in (rank["accelerate"] for rank in ranks):
        assert "`buoy.integrations.deepspeed.use`" in found["refused"]
        assert found["apart"] == 0.0
        assert found["moved"] > 0.1
        assert found["lr"][0] == found["lr"][1]
        assert found["skipped"] == list(BAD)
        assert found["logged"] == ["buoy/norm", "buoy/scale", "buoy/skipped"]


def test_what_cannot_be_done_is_refused(ranks):
    """Policies that measure gradients, and an engine without a scaler."""
    refused = ranks[0]["others"]["refused"]
    assert "Headroom reads amax_log2, loss_finite, underflow" in refused["headroom"]
    assert "LogNormal reads amax_log2, loss_finite" in refused["lognormal"]
    assert "ZeRO stage 1, 2 or 3" in refused["torch"]


def test_only_an_engine_is_accepted():
    """Not the model in it, nor what another wrapper returns."""
    with pytest.raises(OptionError, match="returns, got an object of Linear"):
        ours.use(torch.nn.Linear(1, 1))


def test_the_numbers_of_the_configuration_count_unless_a_policy_is_given(ranks):
    """They are parameters of DeepSpeed's rule."""
    found = ranks[0]["others"]
    assert found["static"] == 64.0
    assert found["default"]["init_scale"] == 2.0**8
    assert found["default"]["hysteresis"] == 2


def test_the_private_names_that_we_use_are_still_there(ranks):
    """Of DeepSpeed's optimizers, engines and scalers, without ours."""
    found = ranks[0]["others"]
    assert found["missing"] == []
    assert found["called"] == ["cur_scale", "loss_scale", "scale_loss", "update_scale"]
    assert found["z0"] is None


def test_bf16_turns_it_off(ranks):
    """Without an error."""
    assert ranks[0]["others"]["bf16"] == [None, {}]
