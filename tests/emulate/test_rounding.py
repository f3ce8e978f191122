"""Rounding to a grid: to nearest, ties to even, subnormals, overflow."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import buoy
from buoy.emulate import round_to
from buoy.emulate.rounding import by_bits, by_conversion

DTYPES = {
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp8_e4m3": ml_dtypes.float8_e4m3,
    "fp8_e4m3fn": ml_dtypes.float8_e4m3fn,
}


def bits(tensor):
    """Compare numbers by their bits, and all NaN as one."""
    return torch.where(tensor.isnan(), torch.nan, tensor).view(torch.int32).tolist()


def expected(values, name):
    """Round as NumPy does."""
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = values.numpy().astype(DTYPES[name])
    return torch.from_numpy(narrow.astype(np.float32))


def neighbours(name):
    """Give every number of the format near its ends, the ties between, and beside."""
    limits = buoy.FORMATS[name]
    step = limits.smallest_subnormal
    low = torch.arange(0, 4 * 2**limits.mantissa_bits + 1).double() * step / 2
    last = limits.max - limits.max * (1 - 2.0**-limits.mantissa_bits)
    high = limits.max + torch.arange(-8, 9).double() * last / 8
    one = 1 + torch.arange(0, 2 ** (limits.mantissa_bits + 1)).double() * (
        2.0 ** -(limits.mantissa_bits + 1)
    )
    exact = torch.cat([low, high, one]).float()
    beside = [
        torch.nextafter(exact, torch.full_like(exact, end)) for end in (0, torch.inf)
    ]
    some = torch.cat([exact, *beside, torch.tensor([torch.inf, torch.nan, 3e38])])
    return torch.cat([some, -some])


@pytest.mark.parametrize("name", DTYPES)
def test_ends_ties_and_subnormals_are_numpys(name):
    """Every number next to a limit or a tie goes where NumPy puts it."""
    values = neighbours(name)

    assert bits(expected(values, name)) == bits(round_to(values, name))


@pytest.mark.parametrize("name", DTYPES)
@given(drawn=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=100))
def test_any_float_is_rounded_as_numpy_does(name, drawn):
    """Of all bit patterns that float32 has."""
    values = torch.tensor(drawn, dtype=torch.int32).view(torch.float32)

    assert bits(expected(values, name)) == bits(round_to(values, name))


@pytest.mark.parametrize("name", ["fp16", "fp8_e5m2"])
def test_rounding_by_bits_equals_rounding_by_conversion(name):
    """Bits and conversions agree on a million numbers of all sizes."""
    drawn = torch.randint(-(2**31), 2**31 - 1, (1_000_000,))
    values = drawn.to(torch.int32).view(torch.float32)
    limits = buoy.FORMATS[name]

    assert bits(by_conversion(limits)(values)) == bits(by_bits(limits)(values))


def test_overflow_is_inf_or_nan_as_the_format_has_it():
    """E4M3FN has no inf, and says NaN rather than its maximum."""
    large = torch.tensor([1e9, -1e9])

    assert [torch.inf, -torch.inf] == round_to(large, "fp16").tolist()
    assert [torch.inf, -torch.inf] == round_to(large, "fp8_e4m3").tolist()
    assert round_to(large, "fp8_e4m3fn").isnan().all()


def test_fp32_is_left_as_it_is():
    """The same tensor comes back."""
    values = torch.tensor([0.1, 1e30])

    assert round_to(values, "fp32") is values


def test_an_unknown_format_is_refused():
    """The error lists those that there are."""
    with pytest.raises(buoy.PolicyError, match="fp8_e5m2"):
        round_to(torch.ones(1), "fp12")
