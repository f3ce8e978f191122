"""The norm is that of the whole model, each part of it counted once."""

import math

import pytest
import tasks
import torch
from layouts import LAYOUTS, batch, mse

ORDERS = [1.0, 2.0, 3.0, math.inf]


def whole_norm(name: str, order: float, size: float) -> float:
    """Take it of the unsharded network, in float64."""
    model = LAYOUTS[name].whole()
    x, y = batch(0)
    mse(model(x), y).backward()
    flat = torch.cat([p.grad.flatten().double() for p in model.parameters()])
    return torch.linalg.vector_norm(flat * size, order).item()


@pytest.mark.parametrize("name", LAYOUTS)
def test_it_equals_that_of_the_unsharded_network(name, crew_of):
    """To a millionth, for every order, on every rank."""
    for order in ORDERS:
        expected = whole_norm(name, order, 1.0)
        for norm in crew_of(LAYOUTS[name].size).run(tasks.norm_of, name, order, 1.0):
            assert expected == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "gpipe"])
def test_squares_that_overflow_are_not_an_overflow(name, crew_of):
    """Gradients around 1e25 are finite, and so is their norm."""
    expected = whole_norm(name, 2.0, 1e25)
    for norm in crew_of(2).run(tasks.norm_of, name, 2.0, 1e25):
        assert expected == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "size", "expected"),
    [
        ("zeros", 2, math.sqrt(4 * 1.0 + 4 * 4.0)),
        ("tied", 2, math.sqrt(14.0 + 2 * 4)),
        ("replicated stages", 4, math.sqrt(4 * 1.0 + 4 * 4.0)),
    ],
)
def test_plain_parameters_are_told_apart(kind, size, expected, crew_of):
    """Stages that look alike, weights that two stages share, replicas of stages."""
    for norm in crew_of(size).run(tasks.norm_by_place, kind):
        assert expected == pytest.approx(norm, rel=1e-6)
