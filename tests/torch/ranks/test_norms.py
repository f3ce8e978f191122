"""The norm is that of the whole model, each part of it counted once."""

import math

import measures
import pytest
import tasks
import torch
from layouts import LAYOUTS, batch, mse

pytestmark = pytest.mark.slow  # starts processes

ORDERS = [1.0, 2.0, 3.0, math.inf]


def whole_norm(name: str, order: float, size: float) -> float:
    """Take it of the unsharded network, in float64."""
    model = LAYOUTS[name].whole()
    x, y = batch(0)
    mse(model(x), y).backward()
    flat = torch.cat([p.grad.flatten().double() for p in model.parameters()])
    return torch.linalg.vector_norm(flat * size, order).item()


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_norm_equals_that_of_the_unsharded_network(name, crew_of):
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
        ("one stage", 2, 2.0),
    ],
)
def test_plain_parameters_are_told_apart(kind, size, expected, crew_of):
    """Stages that look alike, weights that two stages share, replicas, one stage."""
    for norm in crew_of(size).run(tasks.norm_by_place, kind):
        assert expected == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("original", [False, True])
def test_parts_that_wake_up_later_are_compared_then(original, by_hand, crew_of):
    """Shards of zeros without a gradient look like replicas, until they have one."""
    for found in crew_of(2).run(measures.dormant, original, by_hand):
        for norm, true in found:
            assert true == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("idle", ["zero", "none"])
def test_experts_that_began_alike_are_told_apart_once_they_work(idle, crew_of):
    """However the first gradients of theirs come, of one or of both."""
    for found in crew_of(4).run(measures.idle_experts, idle):
        for norm, true in found:
            assert true == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("order", [2.0, math.inf])
def test_a_nan_of_one_rank_is_the_norm_of_all(order, crew_of):
    """No maximum is defined over it, and still nobody may miss it."""
    for norm in crew_of(2).run(measures.one_is_nan, order):
        assert not math.isfinite(norm)


@pytest.mark.parametrize("order", [0.0, -math.inf, math.nan])
def test_a_norm_that_has_no_parts_is_refused(order, crew_of):
    """Before anything is sent, so that a rank may go on."""
    for message in crew_of(2).run(measures.refused, order):
        assert "`norm_type`" in message


@pytest.mark.parametrize("kind", ["sgd", "fused"])
def test_another_norm_is_of_what_was_clipped(kind, crew_of):
    """Whether clipping was written to the gradients or not."""
    for found, true in crew_of(2).run(measures.two_orders, kind):
        assert true == pytest.approx(found, rel=1e-5)


def test_where_nobody_looks_a_bound_takes_the_place_of_an_overflow(crew_of):
    """Clipping harder than need be is no step of zeros."""
    for norm, true in crew_of(2).run(measures.huge_where_nobody_looks):
        assert true * (1.0 - 1e-6) <= norm <= 10.0 * true


def test_a_guard_sees_the_norm_of_who_has_gradients(crew_of):
    """Also where they were unscaled by hand."""
    one, two = crew_of(2).run(measures.guarded_without_gradients)

    assert one == two
    assert one[0]
    assert 0.0 < one[1] < math.inf


def test_other_parameters_are_compared_anew(crew_of):
    """Though there are as many as before, in the same optimizer."""
    for found in crew_of(2).run(measures.replaced_parameters):
        assert [2.0, math.sqrt(8.0)] == pytest.approx(found, rel=1e-6)
