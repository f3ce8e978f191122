"""The example shows what it says: FP16 needs a scale, and then learns as FP32 does."""

import pytest

import buoy.trace
from examples.jax_char_transformer import main


@pytest.mark.long
def test_the_transformer_learns_in_fp16_with_a_scale_alone(tmp_path, capsys):
    """A shortened run: with scaling the loss is FP32's, without it stays behind."""
    told = main(["--steps", "30", "--trace", str(tmp_path)])
    wide = told["FP32"]

    assert abs(told["FP16, headroom"] - wide) < 0.01 * wide
    assert abs(told["FP16, backoff"] - wide) < 0.01 * wide
    assert told["FP16, no scaling"] > 1.05 * wide
    assert "FP16, headroom" in capsys.readouterr().out
    run = buoy.trace.load(tmp_path / "float16-headroom.buoy")
    assert list(range(30)) == [row.step for row in run.rows]
