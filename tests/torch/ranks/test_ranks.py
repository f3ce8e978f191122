"""Ranks that differ, stay away, have nothing, or form groups of their own."""

import math

import differ
import measures
import pytest
import tasks
from crew import Crew

from tests.told import FINITE, NOT_FINITE, UNKNOWN, Told

RULES = [None, "headroom"]


@pytest.mark.parametrize("what", ["scale", "turn", "tracker"])
@pytest.mark.parametrize("kind", ["sgd", "fused"])
def test_a_rank_with_another_state_is_named(what, kind, crew_of):
    """The error says which rank holds what, everywhere, and nothing was applied."""
    for message, held, untouched in crew_of(2).run(
        tasks.differ, what, kind, None, False
    ):
        assert "rank 1 has" in message
        assert {0, 1} == set(held)
        assert held[0] != held[1]
        assert untouched
    if what == "scale":
        assert (64.0, 16.0) == (held[0][0], held[1][0])
        assert "64" in message
        assert "16" in message


def test_a_policys_state_is_compared_too(crew_of):
    """With any rule, not only torch's."""
    for message, *_ in crew_of(2).run(tasks.differ, "scale", "sgd", "headroom", False):
        assert "rank 1 has scale 16" in message


def test_a_rank_with_another_state_is_named_where_the_host_has_to_ask(crew_of):
    """In the one read that a step takes anyway."""
    for message, _, untouched in crew_of(2).run(
        tasks.differ, "scale", "sgd", None, True
    ):
        assert "rank 1 has scale 16" in message
        assert untouched


@pytest.mark.parametrize("kind", ["fused", "sgd"])
def test_a_rank_with_another_state_is_named_late_where_nobody_asks(kind, crew_of):
    """All ranks skip from the first such step on, and are told when word arrives."""
    for told in crew_of(2).run(tasks.late, kind):
        assert told is not None
        step, untouched = told
        assert step < 40
        assert untouched


STRAYS = {
    "clips": "clipping by a norm",
    "clips later": "clipping by a norm",
    "clips by hand": "clipping by the largest gradient",
    "clips 2-norm by hand": "clipping by a norm, after `unscale_`",
    "guards": "clipping by a norm",
    "guards by hand": "clipping by a norm, after `unscale_`",
    "foresees": "scaling a loss",
}


@pytest.mark.parametrize("kind", STRAYS)
@pytest.mark.parametrize(("size", "parallel"), [(2, "no"), (4, "no"), (2, "ddp")])
def test_ranks_that_do_different_things_are_told_so(kind, size, parallel, crew_of):
    """Before any of them applies a step; DDP's own messages do not wait for it."""
    others = "rank 1" if size == 2 else "ranks 1, 2, 3"
    for message, untouched in crew_of(size).run(differ.stray, kind, parallel, False):
        assert f"rank 0: {STRAYS[kind]}" in message
        assert f"{others}: checking gradients" in message
        assert untouched


@pytest.mark.parametrize("kind", STRAYS)
@pytest.mark.parametrize("parallel", ["no", "ddp"])
def test_where_nobody_reads_ranks_that_differ_skip(kind, parallel, crew_of):
    """And get the error once it is known."""
    for message, untouched in crew_of(2).run(differ.stray, kind, parallel, True):
        assert "Ranks" in message
        assert untouched


@pytest.mark.parametrize("bad", [False, True])
def test_all_ranks_evaluate_a_closure_or_none_steps(bad, crew_of):
    """An overflow of one ends the step of all."""
    one, two = crew_of(2).run(differ.evaluations, bad)

    assert one == two
    assert [True, not bad, True] == [applied for applied, _ in one[0]]
    assert (32.0 if bad else 64.0) == one[0][-1][1]


@pytest.mark.parametrize("clip", [False, True])
def test_torchs_flags_and_norm_are_those_that_the_ranks_agreed_on(clip, crew_of):
    """After `unscale_`, as PyTorch's own test of FSDP2 with a scaler demands."""
    for found, norm, applied, scale in crew_of(4).run(differ.read_after_unscale, clip):
        assert [1.0] == found
        assert norm == math.inf
        assert not applied
        assert 32.0 == scale


@pytest.mark.slow
@pytest.mark.parametrize("backend", [None, "cpu:gloo"])
def test_gloo_is_gloo_by_any_name(backend):
    """The scaler asks through a group of its own wherever gloo carries it."""
    crew = Crew(2, backend=backend)
    try:
        found = crew.run(differ.own_line)
    finally:
        crew.close()

    for name, shared in found:
        assert "gloo" != name
        assert not shared


@pytest.mark.slow
@pytest.mark.parametrize(("who", "killed"), [(0, False), (2, False), (1, True)])
def test_an_absent_rank_is_named_after_the_timeout(who, killed):
    """The others do not hang, and nothing of theirs has moved."""
    crew = Crew(3, timeout=2.0)
    try:
        found = crew.outcomes(tasks.absent, who, killed)
    finally:
        crew.close()

    left = found.pop(who)
    assert "gone" == left.kind if killed else "away" == left
    for kind, absent, message, kept in found:
        assert "AbsentRankError" == kind
        assert (who,) == absent
        assert f"Missing: rank {who}; present: " in message
        assert kept


@pytest.mark.parametrize("kind", ["sgd", "fused"])
@pytest.mark.parametrize("clip", [False, True])
def test_a_rank_without_gradients_takes_part(kind, clip, crew_of):
    """It skips when the other does, and its scale moves with the other's."""
    runs = crew_of(2).run(tasks.without_gradients, kind, clip, False)

    assert runs[0] == runs[1]
    assert [True, False, True, True] == [applied for applied, _ in runs[0]]
    assert [64.0, 32.0, 32.0, 64.0] == [scale for _, scale in runs[0]]


def test_nobody_having_gradients_is_still_a_mistake(crew_of):
    """Every rank is told, none hangs."""
    for error in crew_of(2).outcomes(tasks.without_gradients, "sgd", False, True):
        assert "CallOrderError" == error.kind


def test_a_rank_without_parameters_takes_part(crew_of):
    """Nor does it need a loss."""
    runs = crew_of(2).run(tasks.without_parameters)

    assert [(True, 64.0), (False, 32.0), (True, 32.0), (True, 64.0)] == [
        (applied, scale) for applied, scale, _ in runs[0]
    ]
    for one, other in zip(*runs, strict=True):
        assert one == other or not one[0]


def test_gradients_that_nobody_scaled_are_still_a_mistake(crew_of):
    """Sharing a scale does not hide that `scale` was never called."""
    for message in crew_of(2).run(tasks.nobody_scales):
        assert "scaler.scale" in message


SKIPPED = {
    "default": [0, 1, 2, 3],
    "world": [0, 1, 2, 3],
    "row": [0, 1],
    "several": [0, 1, 2, 3],
    "mesh": [0, 1, 2, 3],
    "submesh": [0, 1],
    "nobody": [0],
}


@pytest.mark.parametrize("kind", SKIPPED)
def test_who_agrees_can_be_chosen(kind, crew_of):
    """A group, several, a mesh, everybody, or nobody."""
    found = crew_of(4).run(tasks.groups, kind)

    skipped = [rank for rank, (applied, *_) in enumerate(found) if not applied]
    assert SKIPPED[kind] == skipped
    for rank, (_, scale, _) in enumerate(found):
        assert scale == (32.0 if rank in skipped else 64.0)
    if kind in ("default", "world", "several", "mesh"):
        assert 1 == len({norm for *_, norm in found})


def test_ranks_that_do_not_train_are_left_alone(crew_of):
    """A part of the world agrees among itself."""
    assert [None, None, [False] * 2, [False] * 2] == crew_of(4).run(tasks.other_half)


def test_a_group_must_be_one():
    """What is no group is refused at once."""
    from buoy.torch import GradScaler, OptionError

    with pytest.raises(OptionError, match="process_group"):
        GradScaler("cpu", process_group=-100)  # not a member: torch's sign for it
    with pytest.raises(OptionError, match="norm_group"):
        GradScaler("cpu", norm_group=-100)


@pytest.mark.parametrize("option", ["process_group", "norm_group"])
def test_a_group_that_was_destroyed_is_an_error(option, crew_of):
    """The scaler does not keep it alive, and says what to do."""
    for message in crew_of(2).run(tasks.destroyed, option):
        assert "has been destroyed" in message
        assert "Create a new scaler" in message


@pytest.mark.parametrize("fused", [False, True])
def test_looking_does_not_wait_for_the_others(fused, crew_of):
    """Ranks exchange their findings where the step is, not in `unscale_`."""
    assert [True, True] == crew_of(2).run(tasks.overlaps, fused)


@pytest.mark.parametrize(
    ("max_norm", "policy", "count"),
    [
        (None, None, 1),
        (1.0, None, 1),
        (None, Told(), 1),
        (1.0, Told(), 1),
        (None, "backoff", 1),
        (1.0, "backoff", 1),
        (None, "loss_ahead", 2),
        (1.0, "loss_ahead", 2),
    ],
)
@pytest.mark.parametrize("by_hand", [False, True])
def test_what_is_sent_is_what_the_documents_say(
    max_norm, policy, count, by_hand, crew_of
):
    """One all-reduce per step, also to clip replicas; one more to foresee."""
    for found in crew_of(2).run(tasks.collectives, max_norm, policy, by_hand):
        assert {"gloo:all_reduce": count} == found


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("policy", RULES)
def test_no_host_read_with_fused_optimizers(clip, policy, crew_of):
    """Ranks agree without any of them asking its device."""
    runs = crew_of(2).run(tasks.unread, "fused", clip, policy)

    assert runs[0] == runs[1]
    assert [True, True, True, False, True] == [applied for applied, _ in runs[0]]


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("kind", ["sgd", "fused"])
def test_all_are_told_that_the_loss_of_one_rank_was_not_finite(
    kind, clip, hidden, crew_of
):
    """Also ranks without a loss, and where the host never asks a device."""
    for silent in (None, 0):
        runs = crew_of(2).run(tasks.told, kind, clip, hidden, silent)

        assert runs[0] == runs[1]
        bad = [FINITE, FINITE, NOT_FINITE, FINITE, NOT_FINITE, NOT_FINITE, FINITE]
        assert bad == runs[0]


def test_losses_that_are_sharded_count_in_full(crew_of):
    """Each rank looks at its own part."""
    told = [FINITE, NOT_FINITE, NOT_FINITE]

    assert [told, told] == crew_of(2).run(tasks.told_of_sharded_losses)


def test_a_loss_that_no_rank_scales_is_not_known(crew_of):
    """E.g. if it is multiplied by the scale by hand."""
    assert [[FINITE, UNKNOWN, FINITE]] * 2 == crew_of(2).run(tasks.untold)


@pytest.mark.parametrize("silent", [None, 0])
def test_a_loss_that_jumps_on_one_rank_is_foreseen_by_all(silent, crew_of):
    """All lower the scale of that very step alike, also where a rank had no batch."""
    runs = crew_of(2).run(tasks.jump, silent)

    assert runs[0] == runs[1]
    assert runs[0][10] <= runs[0][9] / 2**10


def test_gradients_too_small_on_one_rank_are_so_for_all(crew_of):
    """Of the share that underflows, ranks take the largest."""
    nobody, one, other = (
        crew_of(2).run(measures.underflowing, who) for who in (None, 0, 1)
    )

    for runs in (nobody, one, other):
        assert runs[0] == runs[1]
    assert nobody[0] != one[0]
    assert one[0] == other[0]


@pytest.mark.parametrize("given", [True, False])
def test_copies_agree_with_whom_the_scaler_did(given, crew_of):
    """A pickle knows no group, and all ranks are this one's; groups of it follow."""
    for rank, (applied, scales) in enumerate(crew_of(2).run(differ.copied, given)):
        fine = not given and rank == 0
        assert [fine] * 4 == applied
        assert [64.0 if fine else 32.0] * 4 == scales


def test_gradients_that_fsdp_keeps_in_fp16_are_called_so(crew_of):
    """Their parameters are FP32 as ever: nobody cast them."""
    for message in crew_of(2).run(differ.kept_low):
        assert "FP16 gradients" in message
        assert "Something cast them" not in message


@pytest.mark.slow
def test_a_rank_that_runs_out_of_data_is_named():
    """No hang and no crash: an error that tells the cure, and nothing applied."""
    crew = Crew(2, timeout=2.0)
    try:
        _, told = crew.outcomes(differ.uneven)
    finally:
        crew.close()

    kind, absent, message, kept = told
    assert "AbsentRankError" == kind
    assert (0,) == absent
    assert "equally many batches" in message
    assert kept


def test_a_shared_step_is_not_compiled(crew_of):
    """The compiler would leave the other ranks out; the error says what to do."""
    for message in crew_of(2).run(differ.compiled):
        assert "a step of several ranks" in message


@pytest.mark.parametrize("policy", [None, "headroom", "lognormal"])
@pytest.mark.parametrize("recorded", [False, True])
def test_gradients_of_zero_on_one_rank_are_not_stuck(
    policy, recorded, crew_of, tmp_path
):
    """Others have gradients; an error of one rank alone would leave them waiting."""
    trace = str(tmp_path / "run.jsonl") if recorded else None
    assert [12, 12] == crew_of(2).run(tasks.zeros_of_one_rank, policy, trace)
