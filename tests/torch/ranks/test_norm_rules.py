"""Norms over ranks from facts: right in every layout, or refused with what to say."""

import math

import placements
import pytest
import torch
from layouts import batch, mse

ORDERS = [1.0, 2.0, 3.0, math.inf]
KNOWN = [name for name in placements.ALL if name != "unshared"]
APART = ["`norm_group=`", "DDP", "`process_group=()`"]


def whole_norm(name: str, order: float = 2.0) -> float:
    """Take it of the unsharded network, in float64."""
    model = placements.ALL[name].whole()
    x, y = batch(0)
    mse(model(x), y).backward()
    flat = torch.cat([p.grad.flatten().double() for p in model.parameters()])
    return torch.linalg.vector_norm(flat, order).item()


def assert_right(crew, name, *how):
    """Every rank gives the norm of the unsharded network, the same bits."""
    found = crew.run(placements.norm_in, name, *how)
    assert whole_norm(name, how[0]) == pytest.approx(found[0], rel=2e-6)
    assert {found[0]} == set(found)


@pytest.mark.slow
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("name", KNOWN)
def test_the_norm_is_that_of_the_unsharded_network(name, by_hand, crew_of):
    """For every order; where the ranks cannot know, with what they need to be told."""
    crew = crew_of(placements.ALL[name].size)
    for order in ORDERS:
        assert_right(crew, name, order, True, by_hand)


@pytest.mark.parametrize("name", KNOWN)
def test_the_norm_is_right_where_the_host_reads_nothing(name, crew_of):
    """What runs then is what runs on a device that has to be asked."""
    crew = crew_of(placements.ALL[name].size)
    assert_right(crew, name, 2.0, True, False, True)


@pytest.mark.parametrize(
    "name", ["averaged by hand", "two meshes", "fsdp2 x stages", "routed"]
)
def test_no_value_is_read(name, crew_of):
    """After the first clipping, which asks meshes for their ranks."""
    for found in crew_of(placements.ALL[name].size).run(placements.unread, name):
        assert [whole_norm(name)] * 3 == pytest.approx(found, rel=2e-6)


@pytest.mark.parametrize("name", placements.PLAIN)
def test_facts_suffice(name, crew_of):
    """Without a word of the user."""
    assert_right(crew_of(placements.ALL[name].size), name, 2.0, False)


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("name", [*placements.STAGES, "unshared"])
def test_gradients_that_differ_are_refused(name, by_hand, crew_of):
    """They may be parts, or nothing has averaged them; the error names both cures."""
    crew = crew_of(placements.ALL[name].size)
    for error in crew.outcomes(placements.norm_in, name, 2.0, False, by_hand):
        assert "RankMismatchError" == error.kind
        for words in APART:
            assert words in error.message
        assert "rank 0 has a gradient norm of" in error.message


@pytest.mark.parametrize("name", placements.STAGES)
def test_the_largest_gradient_needs_no_word(name, crew_of):
    """Whoever holds it, it is the largest."""
    assert_right(crew_of(placements.ALL[name].size), name, math.inf, False)


@pytest.mark.parametrize("name", placements.UNITS)
def test_sharded_parameters_that_say_nothing_need_the_model(name, crew_of):
    """Nothing was sent, so a step without clipping goes on."""
    crew = crew_of(placements.ALL[name].size)
    for message, applied in crew.run(placements.refused_then_steps, name):
        assert "`GradScaler(model=model)`" in message
        assert applied


def test_one_group_for_all_counts_replicas_twice(crew_of):
    """As the documents warn: experts beside a router need a group per parameter."""
    model = placements.ALL["routed"].whole()
    x, y = batch(0)
    mse(model(x), y).backward()
    shared = sum(p.grad.double().square().sum() for p in model.shared.parameters())
    expected = math.sqrt(whole_norm("routed") ** 2 + shared.item())

    assert expected / whole_norm("routed") > 1.05
    for norm in crew_of(2).run(placements.norm_of_one_group, "routed"):
        assert expected == pytest.approx(norm, rel=2e-6)


def test_units_in_stages_need_both(crew_of):
    """With the model alone ranks hold different parts."""
    for error in crew_of(4).outcomes(
        placements.norm_in, "fsdp1 x stages", 2.0, True, False, False, ("norm_group",)
    ):
        assert "RankMismatchError" == error.kind
        assert "`norm_group=`" in error.message


def test_an_error_gives_what_each_rank_holds(crew_of):
    """The unscaled norm, and of how many elements."""
    one, two = crew_of(2).run(placements.differing_held)

    for held, _ in (one, two):
        assert {0, 1} == set(held)
        assert one[1] == pytest.approx(held[0], rel=1e-6)
        assert two[1] == pytest.approx(held[1], rel=1e-6)


def test_replicas_may_drift_by_rounding(crew_of):
    """A first clipping at step 31 counts them once, and gives all the same bits."""
    found = crew_of(4).run(placements.drifted)

    assert any(not torch.equal(found[0][2], weights) for *_, weights in found)
    assert 1 == len({norm for norm, *_ in found})
    for norm, true, _ in found:
        assert true == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("kind", ["fused", "sgd"])
def test_where_nobody_reads_the_error_comes_late(kind, crew_of):
    """All steps since then are skipped."""
    for told in crew_of(2).run(placements.apart_on_a_device, kind):
        assert told is not None
        step, message, untouched = told
        assert step < 40
        assert "`norm_group`" in message
        assert untouched


def test_a_group_on_some_ranks_only_is_an_error(crew_of):
    """And no rank waits for a sum that the others do not take part in."""
    for message in crew_of(2).run(placements.grouped_on_some):
        assert "Ranks clip in different ways" in message
        assert "`norm_group`" in message


@pytest.mark.parametrize("orders", [(1.0, 2.0), (1.0, math.inf)])
def test_orders_that_differ_are_an_error(orders, crew_of):
    """Their powers cannot be added up."""
    for message in crew_of(2).run(placements.two_norm_types, *orders):
        assert "`norm_type`" in message


@pytest.mark.parametrize("what", ["parameters", "gradients"])
def test_a_rank_that_has_nothing_counts_nothing(what, crew_of):
    """The norm is that of the others, for every rank."""
    for found in crew_of(2).run(placements.nothing_on_one, what):
        for norm, order in zip(found, (1.0, 2.0, math.inf), strict=True):
            assert whole_norm("zero", order) == pytest.approx(norm, rel=2e-6)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize(
    "name", ["averaged by hand", "two meshes", "ddp x stages", "tp of copies", "routed"]
)
def test_an_overflow_of_one_rank_is_a_skip_and_no_mismatch(name, by_hand, bad, crew_of):
    """The ranks' gradients differ then, and that says nothing about their layout."""
    crew = crew_of(placements.ALL[name].size)
    found = crew.run(placements.norm_in, name, 2.0, True, by_hand, False, (), bad)

    skips = [norm == math.inf for norm in found]
    if name == "tp of copies":  # ranks of one column agree, and no others
        assert skips[1]
        assert skips[3]
    else:
        assert all(skips)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("averaged by hand", 1),  # MAX
        ("fsdp1 FULL_SHARD", 2),  # MAX, SUM over all ranks
        ("two meshes", 2),
        ("four stages", 3),  # MAX, SUM over the group, MAX
        ("ddp x stages", 3),
        ("fsdp2 x stages", 4),  # and SUM over the shards
    ],
)
def test_clipping_sends_what_the_documents_say(name, count, crew_of):
    """One all-reduce for replicas, one more for shards; groups take their own."""
    for found in crew_of(placements.ALL[name].size).run(placements.collectives, name):
        assert {"gloo:all_reduce": count} == found


def test_join_is_refused_with_a_recipe(crew_of):
    """Uneven inputs are the data loader's to mend."""
    for message in crew_of(2).run(placements.joined):
        assert "the same number of batches" in message
        assert "a loss of zero" in message
