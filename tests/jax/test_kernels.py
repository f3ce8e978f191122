"""How many kernels a step launches: they are counted, not timed."""

from functools import cache

import pytest

pytest.importorskip("flax")
pytest.importorskip("jmp")

from benchmarks import jax_step

A_FEW = 5
HEADROOM_AT_MOST = 265

launches = cache(jax_step.launches)


@pytest.mark.slow
def test_torchs_rule_launches_few_more_kernels_than_flax():
    """With the same optimizer and clipping; and no step has a collective."""
    flax, backoff = launches("flax"), launches("buoy backoff")

    assert launches("unscaled").kernels < flax.kernels
    assert backoff.kernels <= flax.kernels + A_FEW
    assert 0 == flax.collectives == backoff.collectives


@pytest.mark.slow
def test_headroom_launches_few_kernels():
    """Its operations on numbers are kernels, too, as far as XLA fuses none."""
    assert launches("buoy headroom").kernels <= HEADROOM_AT_MOST


PROGRAM = """
HloModule jit_step

%inside (a: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  ROOT %twice = f32[] add(%a, %a)
}

ENTRY %main (x: f32[4], y: f32[4]) -> (f32[], f32[4]) {
  %x = f32[4]{0} parameter(0)
  %y = f32[4]{0} parameter(1)
  %both = (f32[4]{0}, /*index=1*/f32[]) fusion(%x, %y), kind=kLoop, calls=%inside
  %first = f32[4]{0} get-tuple-element(%both), index=0
  %second = f32[] get-tuple-element(%both), index=1
  %started = f32[] all-reduce-start(%second), to_apply=%inside
  %sum = f32[] all-reduce-done(%started)
  %rounded = f32[] reduce-precision(%sum), exponent_bits=8, mantissa_bits=7
  %product.1 = f32[4]{0} multiply(%first, %y), metadata={op_name="jit(f)/mul"}
  ROOT %out = (f32[], f32[4]{0}) tuple(%rounded, %product.1)
}
"""


def test_a_fusion_is_one_kernel_and_its_parts_are_none():
    """Three kernels, and a collective that counts once."""
    assert (3, 1) == jax_step.launches_of(PROGRAM)


def test_a_program_with_a_branch_is_refused():
    """What is inside would not be counted."""
    with pytest.raises(ValueError, match="inside a conditional"):
        jax_step.launches_of(PROGRAM.replace("multiply(", "conditional("))
