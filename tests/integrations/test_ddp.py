"""DDP inside of training libraries: two processes, and an overflow on one of them."""

import pytest
from ranks import run_ranks
from tiny import BAD


@pytest.mark.parametrize("host", ["accelerate", "transformers", "lightning"])
def test_all_ranks_skip_a_step_that_overflows_on_one(host, tmp_path):
    """Weights, LR and counters equal a loop by hand that never saw its batch."""
    ranks = run_ranks("ddp.py", tmp_path, host)
    for found in ranks:
        assert found["wrapped"] == "DistributedDataParallel"
        # The clip factor is part of the division by the scale: one rounding less.
        assert found["apart"] <= 1e-6
        assert found["moved"] > 0.1
        assert found["lr"][0] == found["lr"][1]
        assert found["skipped"] == list(BAD)
        assert found["dtypes"] == ["torch.float16"]
    assert ranks[0]["scale"] == ranks[1]["scale"]
