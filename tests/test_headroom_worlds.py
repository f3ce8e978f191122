"""Headroom in generated worlds: what the weights' gradients do not show.

A world says, for each step, how large the largest weight gradient and the largest
hidden tensor of the backward pass (an activation gradient, the loss's cotangent) are,
unscaled and in log2.  A step overflows if either does; only the first is measured.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import buoy
from buoy import Headroom, Seen
from buoy._core.ops import PLAIN
from buoy._core.policies import headroom, headroom_ceiling
from buoy._core.step import MEASUREMENTS

LIMIT, GONE, SMALL = math.log2(65504.0), -25.0, -20.0
BACK = 2900  # steps after which the scale is back: docs/policies/headroom.md


class Moment(NamedTuple):
    """One step of a world; sizes in log2."""

    visible: float  # -inf: all gradients are zero
    hidden: float = -math.inf
    loss: float | None = None
    bad: bool = False  # NaN, whatever the scale

    @property
    def fits(self) -> float:
        """The log2 of the largest scale that fits."""
        return math.floor(LIMIT - max(self.visible, self.hidden))


class Lived(NamedTuple):
    """What a policy did in a world."""

    scales: list[float]  # log2
    skips: list[int]


def live(world: Sequence[Moment], start: int = 8, spread: float = 8.0) -> Lived:
    """Lead Headroom through a world; gradients lie within `spread` binades."""
    policy = Headroom()
    state, scales, skips = policy.init(scale=2.0**start), [], []
    for step, now in enumerate(world):
        if now.loss is not None:
            state = policy.foresee(state, 2.0**now.loss, ops=PLAIN)
        k = math.log2(state.scale)
        scales.append(k)
        finite = not now.bad and k + max(now.visible, now.hidden) <= LIMIT
        if not finite:
            skips.append(step)
        size = now.visible + k if now.visible + k >= GONE else -math.inf
        share = None
        if finite and size > GONE and MEASUREMENTS["underflow"].due(step):
            share = min(max((SMALL - size + spread) / spread, 0.0), 1.0)
        seen = Seen(finite, size if finite else math.inf, share)
        state = policy.update(state, seen, ops=PLAIN)
        assert policy.min_scale <= state.scale <= policy.max_scale
    return Lived(scales, skips)


def settles(skips: list[int]) -> bool:
    """Eight skips at most; each further one 500 steps after the one before."""
    return all(b - a >= 500 for a, b in pairwise(skips[7:]))


@pytest.mark.parametrize("holds", [True, False])
@pytest.mark.parametrize(
    "world",
    [
        [Moment(-30.0, -10.0)] * 2000,
        [Moment(-30.0 + 13 * (t % 2)) for t in range(2000)],
    ],
    ids=["hidden", "alternating"],
)
def test_worlds_settle_only_because_the_ceiling_holds(world, holds, monkeypatch):
    """The check below notices a rule whose ceiling never holds."""
    if not holds:
        monkeypatch.setattr(headroom_ceiling, "LEAST", 1.0)
        monkeypatch.setattr(headroom_ceiling, "MOST", 1.0)

    assert settles(live(world).skips) == holds


starts = st.integers(-24, 64)
spreads = st.sampled_from([8.0, 20.0, 40.0])
seeds = st.integers(0, 2**32)
wobbles = st.sampled_from([0.0, 0.25])
few = settings(max_examples=25, phases=(Phase.explicit, Phase.generate))


@few
@given(starts, st.integers(-20, 50), st.floats(-45, 4), st.sampled_from([0, -20, 8]),
       st.sampled_from([0.0, 0.2, 1.0]), wobbles, spreads, seeds)  # fmt: skip
def test_a_hidden_ceiling_is_found_within_eight_skips(
    start, ceiling, size, drift, noise, wobble, spread, seed
):
    """From any start, wherever it is, while it wobbles and the weights' drift."""
    rng = random.Random(seed)
    world = []
    for t in range(2000):
        hidden = LIMIT - ceiling - 0.5 + wobble * rng.gauss()
        visible = size + drift * t / 2000 + noise * rng.gauss()
        world.append(Moment(min(visible, hidden), hidden))

    assert settles(live(world, start, spread).skips)


@few
@given(starts, st.floats(1, 20), st.sampled_from([1, 1, 2, 3, 5, 10, 30, 100, 200]),
       st.sampled_from([0.0, -8.0, 2.0]), wobbles, spreads, seeds)  # fmt: skip
def test_tasks_that_alternate_settle_within_eight_skips(
    start, gap, period, beside, wobble, spread, seed
):
    """In turn or in blocks, with hidden tensors smaller or larger than the visible."""
    rng = random.Random(seed)
    world = []
    for t in range(2000):
        level = -30.0 + gap * ((t // period) % 2) + wobble * rng.gauss()
        world.append(Moment(level, level + beside))

    assert settles(live(world, start, spread).skips)


@few
@given(starts, st.floats(1, 20), st.sampled_from([1, 2, 3, 5, 10, 30, 100]), spreads)
def test_hidden_tensors_that_alternate_cost_a_skip_in_500(start, gap, period, spread):
    """While the weights' gradients stand still: 8 skips and then this rate."""
    world = [Moment(-30.0, -20.0 + gap * ((t // period) % 2)) for t in range(3000)]

    assert len(live(world, start, spread).skips) <= 8 + 3000 / 500


@few
@given(
    st.integers(-24, 32), st.floats(-40, 6), st.integers(0, 300), st.integers(1, 1500)
)
def test_after_zero_gradients_the_first_real_ones_cost_three_skips(
    start, size, before, zeros
):
    """At the start and in mid-run, for long and for short."""
    world = [Moment(size)] * before + [Moment(-math.inf)] * zeros + [Moment(size)] * 100
    lived = live(world, start)

    assert 3 >= sum(skip >= before + zeros for skip in lived.skips)


@settings(few, max_examples=12)
@given(starts, st.floats(-40, 4), st.sampled_from([-math.inf, -20.0, -3.0, 6.0]),
       st.sampled_from(["spikes", "nan", "noise", "jump", "hidden", "zeros"]),
       spreads, seeds)  # fmt: skip
def test_the_scale_comes_back_once_the_world_stands_still(
    start, size, hidden, trouble, spread, seed
):
    """Within `max_margin` of the largest that fits, and it stays there."""
    rng = random.Random(seed)
    world = []
    for _ in range(600):
        now = Moment(size, hidden, loss=rng.uniform(-3, 3))
        if trouble == "spikes" and rng.random() < 0.02:
            now = now._replace(visible=size + rng.uniform(3, 14))
        elif trouble == "nan":
            now = now._replace(bad=rng.random() < 0.3)
        elif trouble == "noise":
            now = now._replace(visible=size + rng.gauss(0, 3))
        elif trouble == "jump":
            now = now._replace(visible=size + 13)
        elif trouble == "hidden":
            now = now._replace(hidden=LIMIT + 10)
        elif trouble == "zeros":
            now = now._replace(visible=-math.inf)
        world.append(now)
    still = Moment(size, hidden, loss=0.0)
    scales = live([*world, *[still] * (BACK + 400)], start, spread).scales
    wanted = min(still.fits, 64) - Headroom().max_margin

    assert min(scales[600 + BACK :]) >= wanted


@few
@given(st.floats(-20, 0), st.floats(3, 12), seeds)
def test_spikes_that_the_loss_announces_cost_nothing(size, height, seed):
    """Whether a ceiling binds or not."""
    rng = random.Random(seed)
    jumps = [height if rng.random() < 0.02 else 0.0 for _ in range(400)]
    world = [Moment(size + jump, size + jump + 1, loss=jump) for jump in jumps]
    calm = [Moment(size, size + 1, loss=0.0)] * 50

    assert not live([*calm, *world]).skips


def test_rare_bad_batches_hardly_lower_the_scale():
    """One in 500, not finite at any scale; the loss does not show them."""
    rng = random.Random(0)
    world = [Moment(-10.0, bad=rng.random() < 0.002) for _ in range(8000)]
    lived = live(world, spread=40.0)
    mean = sum(lived.scales[1000:]) / 7000

    assert mean >= world[0].fits - 8


@few
@given(st.floats(-30, 0), st.floats(4, 30), st.integers(1, 5),
       st.sampled_from([0.0, 0.3]), spreads, seeds)  # fmt: skip
def test_a_loss_that_says_nothing_is_ignored(size, gap, period, noise, spread, seed):
    """A loss that jumps by 4 binades or more, while the gradients stay: no skip."""
    rng = random.Random(seed)
    world = [
        Moment(size + noise * rng.gauss(), loss=gap * ((t // period) % 2) - 26.0)
        for t in range(1000)
    ]
    lived = live(world, spread=spread)
    mute = live([now._replace(loss=None) for now in world], spread=spread)

    assert not lived.skips
    assert sum(mute.scales[100:]) - sum(lived.scales[100:]) <= 900


def test_a_loss_that_was_ignored_is_believed_again_once_it_is_right(monkeypatch):
    """One overflow that it announced is enough; ignored, each would cost a step."""
    liar = [Moment(-5.0, loss=20.0 * (t % 2)) for t in range(100)]
    honest = [Moment(-5.0 + jump, loss=jump) for jump in 3 * [*[0.0] * 80, 12.0]]
    world = [*liar, *honest]

    assert 1 == len(live(world, spread=40.0).skips)
    monkeypatch.setattr(headroom, "DOUBTS", 0.0)
    assert 1 < len(live(world, spread=40.0).skips)


NEW = {"doubts", "since", "spread"}
CEILING = NEW | {"ceiling", "patience", "waited", "hold", "mark"}


@pytest.mark.parametrize(
    ("gone", "new"),
    [
        (CEILING, {"clean": 7.0}),
        (NEW | {"mark"}, {}),
        (NEW, {}),
        ({"spread"}, {}),
    ],
)
def test_a_state_of_an_earlier_rule_is_upgraded(gone, new):
    """Fields that it had stay; the others start as at the start of a run."""
    state = replace(Headroom().init(scale=2.0**12), margin=3000.0)
    old = {name: v for name, v in buoy.encode(state).items() if name not in gone}

    assert state == buoy.decode(old | new)
