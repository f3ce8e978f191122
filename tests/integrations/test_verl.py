"""verl: its FSDP engine ends like one that never saw the batches that overflow."""

from importlib.util import find_spec

import pytest
from ranks import run_ranks
from tiny import BAD, GOOD

pytestmark = pytest.mark.skipif(
    find_spec("verl") is None,
    reason="verl is not installed; `make test-integrations` installs it",
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Run all cases on two ranks."""
    return run_ranks("verl_engine.py", tmp_path_factory.mktemp("verl"))


@pytest.mark.parametrize("case", ["whole model", "lora"])
def test_weights_lr_and_counters_do_not_see_skipped_steps(ranks, case):
    """`install` reaches the scaler; verl unscales, clips, steps and updates."""
    for found in (rank[case] for rank in ranks):
        assert found["ours"]
        assert found["dtypes"] == ["torch.float16"]
        assert found["module"].startswith("FSDP")
        assert found["apart"] == 0.0
        assert found["moved"] > 0.01
        assert found["lr"][0] == found["lr"][1]
        assert found["skipped"] == list(BAD)
        assert found["steps"] == [len(GOOD)]


def test_bf16_turns_it_off(ranks):
    """verl creates no scaler then."""
    assert [rank["bf16"] for rank in ranks] == [None, None]
