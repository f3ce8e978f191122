"""Elementwise operators under `emulate` against torch's own half kernels, bit by bit.

Functions of one argument are tried on all 65536 numbers that FP16 has; those of two on
every pair of the numbers where something happens, and on pairs that hypothesis draws.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from buoy.emulate import emulate

EVERY = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
EVERY = EVERY.view(torch.float16)

UNARY = {
    **{
        name: getattr(torch, name)
        for name in (
            "abs acos asin asinh atan atanh ceil cos cosh digamma erf erfc exp exp2 "
            "expm1 floor frac lgamma log log10 log1p log2 neg reciprocal relu round "
            "rsqrt sigmoid sign sin sinh sqrt square tan tanh trunc"
        ).split()
    },
    **{
        name: getattr(functional, name)
        for name in (
            "celu elu gelu hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish "
            "relu6 selu silu softplus softshrink softsign tanhshrink"
        ).split()
    },
    "gelu tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "clamp": lambda x: x.clamp(-1.5, 2.5),
    "x + 1": lambda x: x + 1,
    "x * 0.1": lambda x: x * 0.1,
    "x / 3": lambda x: x / 3,
    "1 / x": lambda x: 1 / x,
    "1 - x": lambda x: 1 - x,
    "x ** 2": lambda x: x**2,
    "x ** 3": lambda x: x**3,
    "x ** 0.5": lambda x: x**0.5,
    "threshold": lambda x: functional.threshold(x, 0.25, 2.0),
    "masked_fill": lambda x: x.masked_fill(x > 1, -3.3),
    "where": lambda x: torch.where(x > 0, x, 0.5 * x),
    "nan_to_num": torch.nan_to_num,
    "dropout off": lambda x: functional.dropout(x, 0.5, training=False),
    "x * number of one element": lambda x: x * torch.tensor(0.1),
}
BINARY = {
    **{
        name: getattr(torch, name)
        for name in (
            "add atan2 copysign div fmax fmin fmod hypot maximum minimum mul nextafter "
            "remainder sub"
        ).split()
    },
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "add alpha": lambda x, y: torch.add(x, y, alpha=0.1),
    "addcmul": lambda x, y: torch.addcmul(x, x, y),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y),
    "pow": torch.pow,
}


def interesting() -> torch.Tensor:
    """Give numbers at which something happens: ends, ties, subnormals, inf and NaN."""
    powers = [2.0**k for k in range(-24, 16)]
    near = [p * f for p in powers for f in (1.0, 1.0009765625, 1.9990234375)]
    ends = [0.0, 65504.0, 65472.0, 3 * 2.0**-24, 1023 * 2.0**-24, 2049.0, 4098.0]
    numbers = torch.tensor([*near, *ends, float("inf")]).half()
    return torch.cat([numbers, -numbers, torch.tensor([float("nan")]).half()])


def same(real: torch.Tensor, emulated: torch.Tensor) -> torch.Tensor:
    """Say where both are the same number, or both NaN; -0 is not 0."""
    real = real.float()
    equal = (real == emulated) & (real.signbit() == emulated.signbit())
    return equal | (real.isnan() & emulated.isnan())


def both(function, *halves):
    """Compute with torch's half kernels, and emulated."""
    with emulate("fp16"):
        emulated = function(*(half.float() for half in halves))
    return function(*halves), emulated


@pytest.mark.parametrize("name", UNARY)
def test_of_one_argument_all_bits_are_equal(name):
    """Over all numbers that FP16 has."""
    real, emulated = both(UNARY[name], EVERY)

    assert real.dtype is torch.float16
    assert [] == EVERY[~same(real, emulated)].tolist()


@pytest.mark.parametrize("name", BINARY)
def test_of_two_arguments_all_bits_are_equal(name):
    """Over all pairs of the interesting numbers."""
    numbers = interesting()
    x, y = torch.meshgrid(numbers, numbers, indexing="ij")
    real, emulated = both(BINARY[name], x.contiguous(), y.contiguous())

    wrong = ~same(real, emulated)
    assert [] == torch.stack([x[wrong], y[wrong]], 1).tolist()[:10]


HALVES = st.lists(st.integers(0, 65535), min_size=1, max_size=64)


@pytest.mark.parametrize("name", ["add", "mul", "div", "sub"])
@given(bits=HALVES, others=HALVES)
def test_drawn_pairs_are_equal_too(name, bits, others):
    """Of any bit patterns, broadcast against each other."""
    x, y = (
        torch.tensor(b, dtype=torch.int32).to(torch.int16).view(torch.float16)
        for b in (bits, others)
    )
    real, emulated = both(BINARY[name], x[:, None], y[None])

    assert same(real, emulated).all()


GRADIENTS = {
    name: UNARY[name]
    for name in (
        "abs cos elu erf exp gelu hardswish leaky_relu log mish neg reciprocal relu "
        "rsqrt sigmoid silu sin softplus sqrt square tanh"
    ).split()
} | {"x ** 3": UNARY["x ** 3"], "x * 0.1": UNARY["x * 0.1"], "clamp": UNARY["clamp"]}


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("upstream", [1.0, 3e-4, 777.0])
def test_gradients_are_equal_too(name, upstream):
    """Of all numbers, small and large gradients coming in."""
    real = EVERY.clone().requires_grad_()
    narrow = EVERY.float().requires_grad_()
    into = torch.full_like(EVERY, upstream)
    GRADIENTS[name](real).backward(into)
    with emulate("fp16"):
        GRADIENTS[name](narrow).backward(into.float())

    assert [] == EVERY[~same(real.grad, narrow.grad)].tolist()
