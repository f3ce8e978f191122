"""What must hold of the trainings that judge a policy, in torch and in Keras."""

from dataclasses import replace

import pytest

import buoy
from benchmarks.headroom import mlp_tasks
from benchmarks.headroom.bad_batches import NAN_GRADIENTS, NAN_LOSS, at
from benchmarks.headroom.judge import EXACT

TAILS = mlp_tasks.TASKS["hidden_tails"]
SHORT = replace(
    mlp_tasks.TASKS["nan_gradients_single"],
    steps=150,
    rate=0.02,
    bad=at(NAN_GRADIENTS, 7, 12),
)
KINDS = [{}, {"bad": at(NAN_LOSS, 7, 12)}, {"max_norm": 0.1}]


def entered(trainings, monkeypatch, **changes):
    """Enter a short task; return its run under a policy."""
    monkeypatch.setitem(trainings.TASKS, "short", replace(SHORT, **changes))
    trainings.TRAININGS.forget()
    return lambda policy, **options: trainings.run("short", policy, **options)


def bad_batches_alone_are_skipped(trainings, changes, monkeypatch):
    """At a scale at which nothing overflows; and it learns what FP32 learns."""
    run = entered(trainings, monkeypatch, **changes)
    exact, half = run(EXACT), run(buoy.Static(init_scale=128.0))

    assert (2, 2) == (exact.skips, half.skips)
    assert 0 == exact.lost == exact.dead == half.dead == run(EXACT, bad=False).skips
    assert exact.loss < 1.9
    assert half.loss == pytest.approx(exact.loss, rel=0.01)


def gradients_are_lost(trainings, monkeypatch):
    """At a tiny scale all of them, in every good step."""
    found = entered(trainings, monkeypatch)(buoy.Static(init_scale=2.0**-24))

    assert (2, 100, 100) == (found.skips, found.lost, found.dead)


def hidden_tails_overflow(trainings, monkeypatch):
    """At a scale at which the same net without them skips nothing."""
    skips = []
    for draw in (TAILS.draw, SHORT.draw):
        changes = {"draw": draw, "widths": TAILS.widths, "bad": None}
        run = entered(trainings, monkeypatch, **changes)
        skips.append(run(buoy.Static(init_scale=2.0**16)).skips)

    assert skips[0] > 3
    assert 0 == skips[1]
