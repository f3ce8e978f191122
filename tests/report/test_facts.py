"""What a page says in words and figures, without a browser."""

import math
import sys
from dataclasses import replace
from html import escape
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import buoy.report
from buoy import TraceError, Verdict
from buoy._core.verdicts import VERDICTS
from buoy.report import Run, sum_up, summary
from buoy.report.facts import share_points
from buoy.report.figures import loss_charts
from buoy.report.heat import columns
from buoy.report.parts import _tiles
from buoy.report.thin import thinned
from buoy.trace import Counts, Recorder, Recording, Row, Shot

FP16 = math.log2(65504.0)


def run(applied, *, scale=2.0**10, amax=2.0, verdicts=None, shots=(), loss=1.0, **meta):
    """Make a recording of a list of outcomes."""
    rows = [
        Row(
            i,
            scale,
            fine,
            Verdict.APPLIED
            if fine
            else Verdict((verdicts or {}).get(i, "scale_too_high")),
            time=i,
            amax=amax if fine else math.inf,
            loss=loss,
            offenders=() if fine else ("w",),
        )
        for i, fine in enumerate(applied)
    ]
    return Recording("run.buoy", {"ended": 1.0, **meta}, rows, list(shots))


def said(recording):
    """Judge it."""
    return summary(sum_up(recording))


def test_a_quiet_run_is_healthy():
    """Whether nothing was skipped, or only the warm-up was."""
    assert said(run([True] * 500)).level == "healthy"
    found = said(run([False] * 3 + [True] * 500))
    assert (found.level, found.headline) == (
        "healthy",
        "Healthy: 3 steps were skipped, all while warming up",
    )


def test_a_stuck_run_is_in_trouble_and_says_why():
    """Fifty skips in a row at the end, with the remedy of their verdict."""
    verdicts = dict.fromkeys(range(600), "poisoned")
    found = said(run([True] * 500 + [False] * 60, verdicts=verdicts))
    assert (found.level, found.headline[:5]) == ("trouble", "Stuck")
    assert "checkpoint" in found.sentences[0]


@pytest.mark.parametrize("verdict", ["forward_nonfinite", "poisoned", "stale_grads"])
def test_skips_that_no_scale_cures_are_trouble(verdict):
    """Even one of them, by name."""
    found = said(run([True] * 50 + [False] + [True] * 50, verdicts={50: verdict}))
    assert found.level == "trouble"
    assert verdict in found.headline


def test_many_skips_after_the_warm_up_are_worth_a_look():
    """One in ten is many."""
    found = said(run([i % 10 != 0 for i in range(1000)]))
    assert (found.level, found.headline) == ("look", "Many steps are skipped")


def test_underflow_with_room_above_says_which_scale_would_fit():
    """A larger scale is named where there is headroom, and only there."""
    shot = Shot(0, 2.0**10, {"deep.weight": Counts(-20, (50, 50), zeros=100, size=200)})
    found = said(run([True] * 100, amax=2.0**-12, shots=[shot]))
    assert (found.level, found.headline) == ("look", "Gradients underflow")
    assert "2^26" in found.sentences[0]
    assert "deep.weight" in found.sentences[0]
    found = said(run([True] * 100, amax=2.0**5, shots=[shot]))
    assert "A larger scale would overflow" in found.sentences[0]


def test_a_loss_that_is_no_number_is_trouble():
    """Also where every step was applied."""
    assert said(run([True] * 10, loss=math.nan)).level == "trouble"


def test_what_was_lost_or_cut_short_is_said():
    """Rows that did not fit, and a file that was never closed."""
    recording = run([True] * 10, lost=7)
    del recording.meta["ended"]
    text = " ".join(said(recording).sentences)
    assert "7 rows were lost" in text
    assert "was killed" in text
    assert said(run([])).headline == "Nothing was recorded yet"


@pytest.mark.parametrize(("scale", "amax"), [(2.0**-24, 0.0), (2.0**64, 2.0**-50)])
def test_a_run_that_learns_nothing_says_so(scale, amax):
    """In the headline and in the tile; no advice about the skips that led there."""
    look = Shot(100, scale, {"w": Counts(-20, (50, 50), zeros=0, size=100)})
    recording = run([True, False] * 50 + [True] * 60, scale=scale, amax=amax)
    recording.shots.append(look)
    found = said(recording)
    assert (found.level, found.headline) == ("trouble", "Stuck: nothing is learned")
    assert not any("growth interval" in sentence for sentence in found.sentences)
    assert "all: nothing is learned" in _tiles(sum_up(recording))


def test_half_of_the_last_steps_or_zeros_at_the_end_are_stuck():
    """As while training: 101 of 200 steps, or 50 whose gradients were all zero."""
    half = [True] * 300 + [False, True] * 99
    assert "Stuck" not in said(run([*half, True, False])).headline
    found = said(run([*half, False, False]))
    assert found.headline.startswith("Stuck")
    assert "101 of the last 200 steps were skipped" in found.sentences[0]
    assert said(run([True] * 49, amax=0.0)).level == "healthy"
    found = said(run([True] * 50, amax=0.0))
    assert (found.level, found.headline[:5]) == ("trouble", "Stuck")
    assert "all exactly 0" in found.sentences[0]


def test_layers_are_summed_up_worst_first():
    """Shares are means over the looks, headroom the least; broken ones do not count."""
    shots = [
        Shot(0, 1.0, {"a": Counts(0, (4,), zeros=4, size=8), "b": Counts(-16, (1, 3))}),
        Shot(1, 1.0, {"a": Counts(2, (8,), size=8), "b": Counts(-16, (1, 3))}),
        Shot(2, 1.0, {"a": Counts(9, (7,), nonfinite=1), "b": Counts(0, (1,))}),
    ]
    first, second = sum_up(run([True, False], shots=shots)).layers[:2]
    assert (first.name, first.subnormal, first.zero) == ("b", 1.0, 0.0)
    assert (second.name, second.zero, second.subnormal) == ("a", 0.25, 0.0)
    assert second.headroom == pytest.approx(FP16 - 3.0)
    assert sum_up(run([True, False], shots=shots)).offenders == (("w", 1),)


@given(
    st.lists(st.one_of(st.none(), st.floats(allow_nan=True)), max_size=400),
    st.integers(1, 20),
)
def test_thinning_keeps_the_extremes_and_the_order(values, most):
    """In every column, and never more than two points for each."""
    chosen = thinned(values, most)
    assert chosen == sorted(set(chosen))
    assert len(chosen) <= 2 * most + 2
    known = [v for v in values if v is not None and math.isfinite(v)]
    kept = [values[i] for i in chosen if math.isfinite(values[i])]
    if known:
        assert (min(kept), max(kept)) == (min(known), max(known))


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=600, unique=True))
def test_columns_cover_the_time_without_gaps(steps):
    """Each shows a look that was taken, in order."""
    parts = columns([Shot(step, 1.0, {}) for step in sorted(steps)])
    for (_, right, one), (left, _, other) in pairwise(parts):
        assert right == pytest.approx(left)
        assert one.step <= other.step
    assert parts[0][0] == min(steps)
    assert parts[-1][2].step == max(steps)


def test_a_series_of_the_wrong_length_is_refused(tmp_path):
    """It says how many numbers there must be, and what else would do."""
    with Recorder(tmp_path / "run.buoy") as recorder:
        recorder.step(scale=1.0, applied=True)
    with pytest.raises(TraceError, match="each of the 1 recorded steps, got 2"):
        buoy.report.html([Run(tmp_path / "run.buoy", series={"acc": [1.0, 2.0]})])
    with pytest.raises(TraceError, match="at least one run"):
        buoy.report.html([])
    with pytest.raises(TraceError, match="Cannot write the report"):
        buoy.report.write([tmp_path / "run.buoy"], tmp_path / "no" / "page.html")


def test_a_run_without_anything_still_makes_a_page(tmp_path):
    """No step, no histogram, no loss: words instead of charts."""
    with Recorder(tmp_path / "empty.buoy"):
        pass
    with Recorder(tmp_path / "bare.buoy") as recorder:
        recorder.step(scale=1.0, applied=True)
    assert "Nothing was recorded yet" in buoy.report.html([tmp_path / "empty.buoy"])
    page = buoy.report.html([tmp_path / "bare.buoy"])
    assert "No histograms were recorded" in page
    assert "measured in none of its applied steps" in page
    assert "<script src" not in page
    both = buoy.report.html([tmp_path / "bare.buoy", tmp_path / "empty.buoy"])
    assert "The runs compared" in both


def test_the_figure_of_zeros_is_the_last_point_of_the_curve():
    """Steps of norm zero after the last look count; looks at overflows do not."""
    looks = [
        Shot(0, 1.0, {"w": Counts(low=-3, counts=(39,), zeros=1, size=40)}),
        Shot(5, 1.0, {"w": Counts(low=-3, counts=(3,), nonfinite=1, size=4)}),
    ]
    quiet = run([True] * 9, shots=looks)
    assert [step for step, _ in share_points(quiet)] == [0]
    assert sum_up(quiet).shares == share_points(quiet)[-1][1]
    still = run([True] * 9, amax=0.0, shots=looks[:1])
    assert sum_up(still).shares.zero == 1.0
    assert sum_up(still).shares == share_points(still)[-1][1]


def test_each_explanation_is_given_once(tmp_path):
    """In the summary, or in the list of skips, or in neither: not in both."""
    pytest.importorskip("bokeh")
    verdicts = dict.fromkeys(range(99), "forward_nonfinite")
    stuck = run([False] * 99, verdicts=verdicts)
    page = buoy.report.html([Run(stuck)])
    remedy = VERDICTS[Verdict.FORWARD_NONFINITE].sentences.split(".")[0]
    assert page.count(escape(remedy)) == 1


def test_what_was_not_measured_is_not_zero(tmp_path):
    """A tensor that only a skip has named; one without elements; no sign of zero."""
    pytest.importorskip("bokeh")
    shot = Shot(0, 1.0, {"empty": Counts(low=0, counts=()), "v": Counts(0, (4,))})
    seen = run([True, False], amax=65504.0 / 2**10 * 1.01, shots=[shot])
    assert {layer.name for layer in sum_up(seen).layers} == {"v", "w"}
    page = buoy.report.html([Run(seen)])
    assert "-0.0 bits" not in page
    row = page[page.index('<span class="name-of">w</span>') :]
    assert ">0</td>" not in row[: row.index("</tr>")].replace(">1</td>", "")


def test_a_map_of_nothing_is_a_sentence():
    """An empty picture would be taken for a fault."""
    pytest.importorskip("bokeh")
    shot = Shot(0, 1.0, {"w": Counts(low=0, counts=(), zeros=9, size=9)})
    page = buoy.report.html([Run(run([True] * 3, shots=[shot]))])
    assert "exactly zero or not finite" in page
    assert 'id="gradients"' in page


def test_the_title_says_what_the_page_is_about():
    """Model, steps and policy; not a file's name alone."""
    pytest.importorskip("bokeh")
    page = buoy.report.html([Run(run([True] * 3, model="Net", policy="torch"))])
    assert "<h1>Loss scaling in run (Net)</h1><p>3 steps, policy torch.</p>" in page


def test_lines_that_end_together_share_a_label():
    """Neither colour nor dash shows a line that another one covers."""
    pytest.importorskip("bokeh")
    first, second, other = (run([True] * 9, scale=s) for s in (8.0, 8.0, 2.0**20))
    page = buoy.report.html([Run(first, "a"), Run(second, "b"), Run(other, "c")])
    assert '"text":"a,\\\\nb"' in page
    assert '"text":"c"' in page


@pytest.mark.parametrize("amax", [2.0, None])
def test_figures_are_the_same_without_numpy(amax, monkeypatch):
    """NumPy only makes them faster."""
    for applied in ([], [True], [True, False, True, True, True, False]):
        recording = run(applied, amax=amax)
        rows = [
            row._replace(amax=row.amax and row.amax / 2**row.step, time=2.0**row.step)
            for row in recording.rows
        ]
        recording = replace(recording, rows=rows)
        fast = sum_up(recording)
        monkeypatch.setitem(sys.modules, "numpy", None)
        assert repr(sum_up(replace(recording, rows=list(rows)))) == repr(fast)
        monkeypatch.undo()


def test_a_logarithmic_axis_is_labelled_over_its_whole_range():
    """Bokeh's own labels leave out the small numbers of a range below two decades."""
    models = pytest.importorskip("bokeh.models")
    rows = [Row(i, 1.0, True, norm=2.0 ** (-i), time=i) for i in range(8)]
    chart = loss_charts([Run(Recording("run.buoy", rows=rows))], models.Range1d())[
        "norm"
    ]
    shown = [tick for tick in chart.yaxis[0].ticker.ticks if 2.0**-7 <= tick <= 1.0]
    assert shown == [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0]
    assert chart.yaxis[0].major_label_overrides[0.01] == "0.01"


@pytest.mark.parametrize(
    ("losses", "side"), [([2.0, 0.0], "bottom"), ([0.0, 2.0], "top"), ([1.0], "middle")]
)
def test_names_of_lines_that_end_together_stay_in_the_chart(losses, side):
    """They are written below each other, towards the middle."""
    models = pytest.importorskip("bokeh.models")
    rows = [Row(i, 1.0, True, loss=x, time=i) for i, x in enumerate(losses)]
    runs = [Run(Recording(f"{name}.buoy", rows=rows)) for name in "abc"]
    chart = loss_charts(runs, models.Range1d())["loss"]
    (label,) = chart.select({"name": "end loss"})
    assert (label.text, label.text_baseline) == ("a,\nb,\nc", side)


def test_a_scale_that_did_not_move_was_one_number():
    """It did not go from somewhere to the same place."""
    assert any(
        "the scale was 2^10." in text
        for text in summary(sum_up(run("1" * 9))).sentences
    )
