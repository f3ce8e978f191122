"""Logarithms in sixteenths: near the true ones, and the same on every backend."""

import math

import pytest

from buoy._core.ops import PLAIN
from buoy._core.policies.units import SIXTEENTH, floor_log2

NUMBERS = [1e-30, 0.1, 0.9999999, 1.0, 1.0000001, 1.5, 1.9999999, 3.0, 1e30]
NUMBERS += [math.nextafter(2.0**power, 0.0) for power in range(-99, 100, 9)]
NUMBERS += [2.0**power for power in range(-99, 100, 9)]


@pytest.mark.parametrize("x", NUMBERS)
def test_a_logarithm_is_rounded_down_to_sixteenths(x):
    """At most 0.15 below the true one, which is exact at powers of two."""
    found, usable = floor_log2(x, PLAIN)

    assert usable
    assert 0.0 == found % SIXTEENTH
    assert -1e-6 < math.log2(x) - found < 0.15
    assert math.frexp(x)[0] != 0.5 or math.log2(x) == found


@pytest.mark.parametrize("x", [0.0, -1.0, math.inf, -math.inf, math.nan, 1e31, 1e-31])
def test_a_number_without_a_logarithm_is_told(x):
    """Also one beyond float32."""
    assert (0.0, False) == floor_log2(x, PLAIN)
    assert (0.0, False) == floor_log2(1e300, PLAIN)


@pytest.mark.parametrize("backend", ["numpy", "torch", "jax"])
def test_all_backends_find_the_same_logarithm(backend):
    """Bit for bit, next to powers of two as well."""
    module = pytest.importorskip(f"buoy._backends.{backend}")
    for x in [*NUMBERS, 0.0, -1.0, math.inf, math.nan]:
        found, usable = floor_log2(module.lift(x), module.ops())

        assert floor_log2(x, PLAIN) == (float(found), bool(usable))
