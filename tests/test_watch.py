"""When training is stuck, and what is said about it: once, for every front end."""

import logging
import warnings

import pytest

from buoy import Verdict
from buoy._core.errors import OptionError, StuckError, StuckWarning
from buoy._core.step import Row
from buoy._core.verdicts import VERDICTS
from buoy._core.watch import Stuck, Watch


def watched(outcomes, patience=5, **options):
    """Run outcomes through a watch: 1 applied, 0 skipped, z applied with zeros."""
    found = []
    watch = Watch(found.append, patience, **options)
    for outcome in outcomes:
        if outcome == "0":
            watch.skipped(2.0, Verdict.SCALE_TOO_HIGH, ("w",))
        else:
            watch.applied(2.0, norm={"1": 1.0, "z": 0.0, "?": None}[outcome])
    return found


def test_skips_in_a_row_are_stuck_once():
    """At the last of them that is borne, and not at every further one."""
    assert watched("0000") == []
    (stuck,) = watched("1" * 9 + "0" * 9)
    assert (stuck.skipped, stuck.window, stuck.offenders) == (5, 5, ("w",))
    assert "the last 5 steps in a row were skipped, first in `w`" in str(stuck)
    assert "scale_too_high" in str(stuck)


def test_more_than_half_of_a_window_is_stuck():
    """Of four times as many steps; exactly half is not."""
    assert watched("10" * 30) == []
    (stuck,) = watched("100" * 7)
    assert (stuck.skipped, stuck.window) == (13, 20)
    assert "13 of the last 20 steps were skipped" in str(stuck)


def test_a_run_that_moved_again_can_be_stuck_again():
    """After twenty clean steps."""
    assert len(watched("0" * 5 + "1" * 19 + "0" * 5)) == 1
    assert len(watched("0" * 5 + "1" * 20 + "0" * 5)) == 2


def test_gradients_that_are_all_zero_are_stuck():
    """Applied, and nothing is learnt; skips between do not hide it, others do."""
    (stuck,) = watched("z" * 20)
    assert (stuck.zeros, stuck.verdict) == (5, Verdict.APPLIED)
    assert "the last 5 steps were all exactly 0" in str(stuck)
    assert len(watched("zz0zz0z")) == 1
    assert watched("zzzz1zzzz1") == []
    assert len(watched("zz??zz?z")) == 1
    assert watched("?" * 50) == []


def test_a_largest_gradient_of_zero_says_the_same_as_a_norm():
    """Whichever a front end measures."""
    found = []
    watch = Watch(found.append, 3)
    for _ in range(3):
        watch.applied(lambda: 8.0, amax=0.0)
    assert [stuck.scale for stuck in found] == [8.0]


@pytest.mark.parametrize(
    ("scale", "sizes", "said"),
    [
        (2.0**-24, {}, "at the lowest scale, where FP16 gradients are 0"),
        (2.0**-24, {"norm": 0.0}, "at the lowest scale, where FP16 gradients are 0"),
        (2.0**64, {"norm": 2.0**-50}, "a scale of 2^64 or more, and almost no"),
        (2.0**64, {"amax": 2.0**-50}, "a scale that they were never multiplied by"),
        (2.0**100, {"norm": 0.0}, "a scale of 2^64 or more"),
        (2.0**16, {"norm": 0.0}, "were all exactly 0; the scale is 65536. Nothing is"),
    ],
)
def test_idle_steps_at_any_scale_are_stuck(scale, sizes, said):
    """Floor, ceiling and zeros are one thing: nothing is learned."""
    found = []
    watch = Watch(found.append, 5)
    for _ in range(12):
        watch.applied(scale, **sizes)
    (stuck,) = found
    assert stuck.zeros == 5
    assert said in str(stuck)
    assert "Nothing is learned" in str(stuck)


@pytest.mark.parametrize(
    ("scale", "sizes"),
    [
        (2.0**-24, {"norm": 3.0}),
        (2.0**-23, {}),
        (2.0**64, {"norm": 2.0**-30}),
        (2.0**63, {"norm": 2.0**-50}),
        (2.0**100, {}),
        (lambda: pytest.fail("read"), {}),
    ],
)
def test_steps_that_may_learn_are_not(scale, sizes):
    """Large gradients at the floor, BF16 at any scale, a scale that is not read."""
    watch = Watch(lambda stuck: pytest.fail(str(stuck)), 5)
    for _ in range(12):
        watch.applied(scale, **sizes)


def test_a_scale_at_the_floor_has_not_settled(caplog):
    """The line is a warning, and says what such a scale does."""
    caplog.set_level(logging.INFO)
    watch = Watch(patience=50)
    for _ in range(40):
        watch.skipped(2.0**-24, Verdict.SCALE_TOO_HIGH)
    watch.applied(2.0**-24)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "40 skipped, fell to 2^-24, where FP16 gradients are 0" in record.message


def test_a_warning_names_the_line_that_called():
    """Not one inside of Buoy."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Watch(patience=1).skipped(1.0, Verdict.POISONED)
    (warning,) = caught
    assert (warning.filename, warning.category) == (__file__, StuckWarning)
    assert "checkpoint" in str(warning.message)


def test_a_watch_can_raise():
    """With the verdict, for whoever catches it."""
    watch = Watch("raise", 1)
    with pytest.raises(StuckError, match="1 steps in a row") as caught:
        watch.skipped(1.0, Verdict.POISONED)
    assert caught.value.verdict is Verdict.POISONED


def test_a_closer_look_is_taken_only_for_an_alarm():
    """It reads the device."""
    looks = []

    def look():
        looks.append(1)
        return Verdict.POISONED, ("v",)

    found = []
    watch = Watch(found.append, 3)
    for _ in range(5):
        watch.skipped(1.0, Verdict.SCALE_TOO_HIGH, look=look)
    assert (len(looks), found) == (1, [Stuck(3, 3, 1.0, Verdict.POISONED, ("v",))])


def test_rows_are_taken_as_they_are():
    """A message says the scale after the step, whether it was applied or skipped."""
    found = []
    watch = Watch(found.append, 2)
    for step in range(2):
        watch.note(Row(step, 4.0, False, Verdict.BAD_BATCH, 2.0, offenders=("w",)))
    watch.note(Row(2, 2.0, applied=True, next_scale=2.0, norm=1.0))
    assert found == [Stuck(2, 2, 2.0, Verdict.BAD_BATCH, ("w",))]
    assert (watch.steps, watch.skips, watch.streak) == (3, 2, 0)


def test_an_episode_is_one_line(caplog):
    """Under the front end's own logger; a warning if it was not normal."""
    caplog.set_level(logging.INFO)
    watched("000" + "1" * 30 + "0" + "1" * 30, patience=50, logger="buoy.any")
    assert [(r.name, r.levelname, r.getMessage()) for r in caplog.records] == [
        ("buoy.any", "INFO", "warm-up: 3 skipped, settled at 2^1: normal"),
        ("buoy.any", "INFO", "overflow: 1 skipped, settled at 2^1: normal"),
    ]
    caplog.clear()
    watch = Watch(patience=50)
    watch.skipped(1.0, Verdict.DIVERGENCE)
    watch.applied(3.0)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == (
        f"warm-up: 1 skipped, settled at 3: divergence, "
        f"{VERDICTS[Verdict.DIVERGENCE].text}"
    )


@pytest.mark.parametrize("verdict", [Verdict.SPIKE, Verdict.NO_GRADS])
def test_skips_without_an_overflow_are_not_called_one(verdict, caplog):
    """The line begins with the verdict instead; mixed skips, with what was more."""
    watch = Watch(patience=50)
    watch.applied(4.0)
    watch.skipped(4.0, verdict)
    watch.skipped(4.0, verdict)
    watch.skipped(4.0, Verdict.SCALE_TOO_HIGH)
    watch.applied(4.0)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == (
        f"{verdict}: 3 skipped, settled at 2^2: {VERDICTS[verdict].text}"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_stuck": "shout"}, "`on_stuck` must be 'warn', 'raise' or a callable"),
        ({"patience": 0}, "`patience` must be a whole number above 0, got 0"),
        ({"patience": 2.5}, "`patience` must be a whole number above 0, got 2.5"),
    ],
)
def test_bad_options_are_refused(options, message):
    """With what would be accepted."""
    with pytest.raises(OptionError, match=message):
        Watch(**options)


def test_every_verdict_has_one_meaning():
    """No name without a line in the table, and no two flags that exclude each other."""
    assert set(VERDICTS) == set(Verdict)
    for meaning in VERDICTS.values():
        assert not (meaning.grave and (meaning.normal or meaning.curable))
        assert meaning.remedy or not meaning.grave
    markers = [m.marker for v, m in VERDICTS.items() if v is not Verdict.APPLIED]
    assert len(set(markers)) == len(markers)
