"""Limits of the number formats, against NumPy's and ml_dtypes' own."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import buoy

np = pytest.importorskip("numpy")
ml_dtypes = pytest.importorskip("ml_dtypes")

DTYPES = {
    "fp32": np.float32,
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "fp8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "fp8_e4m3": ml_dtypes.float8_e4m3,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_limits_are_those_of_the_dtype(name):
    """Largest, smallest normal and smallest subnormal number, and bits, agree."""
    ours, theirs = buoy.FORMATS[name], ml_dtypes.finfo(DTYPES[name])

    assert float(theirs.max) == ours.max
    assert float(theirs.smallest_normal) == ours.smallest_normal
    assert float(theirs.smallest_subnormal) == ours.smallest_subnormal
    assert theirs.nmant == ours.mantissa_bits
    assert theirs.nexp == ours.exponent_bits


@pytest.mark.parametrize("name", sorted(DTYPES))
@given(data=st.data())
def test_overflow_and_underflow_are_what_a_cast_does(name, data):
    """Casting float64 overflows and underflows exactly where we say."""
    ours = buoy.FORMATS[name]
    edges = [ours.max, ours.smallest_subnormal / 2, ours.smallest_subnormal]
    near = st.sampled_from(edges).flatmap(
        lambda edge: st.floats(0.9, 1.1).map(lambda factor: edge * factor)
    )
    top = 1e39 if name == "fp32" else 3e38
    x = min(data.draw(near | st.floats(0, top) | st.sampled_from(edges)), top)
    if name != "fp32":  # ml_dtypes casts float64 by way of float32
        x = float(np.float32(x))
    with np.errstate(all="ignore"):
        cast = float(np.asarray(x).astype(DTYPES[name]))

    assert ours.overflows(x) == (not math.isfinite(cast))
    assert ours.underflows(x) == (x != 0 and cast == 0)


def test_ties_at_the_edges_round_to_even():
    """Halfway above the maximum overflows in fp16; halfway to zero is zero."""
    fp16 = buoy.FORMATS["fp16"]

    assert (False, True) == (fp16.overflows(65519.99), fp16.overflows(65520.0))
    assert (True, False) == (fp16.underflows(2.0**-25), fp16.underflows(1.1 * 2.0**-25))
    assert fp16.overflows(math.nan)
    assert not fp16.underflows(0.0)


def test_formats_are_found_by_dtype_names():
    """The frameworks' names work; an unknown one lists what there is."""
    assert "bf16" == buoy.number_format("jnp.bfloat16").name
    assert "fp8_e4m3fn" == buoy.number_format("torch.float8_e4m3fn").name
    with pytest.raises(buoy.PolicyError, match="No number format.*fp16"):
        buoy.number_format("int8")
    with pytest.raises(buoy.PolicyError, match="named by a string, got 16"):
        buoy.number_format(16)


def test_only_narrow_exponents_need_scaling():
    """BF16 and FP32 have the range; FP16 and FP8 do not."""
    needy = {name for name, row in buoy.FORMATS.items() if row.needs_scaling}

    assert {"fp16", "fp8_e4m3", "fp8_e4m3fn", "fp8_e5m2"} == needy
