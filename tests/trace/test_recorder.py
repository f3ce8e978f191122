"""What is recorded is what is read, in few bytes, also while the run goes on."""

import math
import os
import sqlite3
import subprocess
import sys
import tracemalloc
from contextlib import closing
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import buoy.trace
from buoy import TraceError, Verdict
from buoy.trace import Counts, Recorder, Row, TraceWarning, row_reader
from buoy.trace.columns import Rows
from buoy.trace.counts import pack, unpack

NUMBERS = st.one_of(st.none(), st.floats(allow_nan=False, width=32))
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "scale": st.floats(2.0**-24, 2.0**40),
            "applied": st.booleans(),
            "norm": NUMBERS,
            "amax": NUMBERS,
            "loss": NUMBERS,
            "offenders": st.lists(st.text(max_size=9), max_size=3, unique=True),
            "time": st.floats(0, 2e9),
        }
    ),
    min_size=1,
    max_size=20,
)


@settings(max_examples=20)
@given(rows=ROWS)
def test_every_row_comes_back_as_it_went_in(rows, tmp_path_factory):
    """Numbers bit for bit, names whatever they are made of."""
    path = tmp_path_factory.mktemp("rows") / "run.buoy"
    with Recorder(path) as recorder:
        for row in rows:
            recorder.step(**row)
    read = buoy.trace.load(path).rows
    assert [row.step for row in read] == list(range(len(rows)))
    for given_, found in zip(rows, read, strict=True):
        assert (found.scale, found.applied) == (given_["scale"], given_["applied"])
        assert (found.norm, found.amax) == (given_["norm"], given_["amax"])
        assert (found.loss, found.time) == (given_["loss"], given_["time"])
        assert set(found.offenders) == set(given_["offenders"])


def test_rows_are_the_same_whatever_is_read_at_once(tmp_path, monkeypatch):
    """Columns are read in parts; an entry that is damaged in a later part is named."""
    path = tmp_path / "run.buoy"
    norms = [1.0, None, math.nan, 0.0, math.inf, None, 2.0]
    with Recorder(path) as recorder:
        for step, norm in enumerate(norms):
            bad = ("a", "b") if step == 4 else ()
            recorder.step(scale=2.0, applied=not bad, norm=norm, offenders=bad)
    whole = buoy.trace.load(path).rows
    monkeypatch.setattr(row_reader, "_CHUNK", 2)
    parts = buoy.trace.load(path).rows
    assert repr(list(parts)) == repr(list(whole))
    assert repr([row.norm for row in whole]) == repr(norms)
    assert (whole[4].offenders, whole[4].applied) == (("a", "b"), False)
    assert repr(whole[-1]) == repr(whole[2:][-1]) == repr(next(reversed(whole)))
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("UPDATE steps SET amax = 'x' WHERE step = 5")
    with pytest.raises(TraceError, match="the entry 5 of its table 'steps'"):
        buoy.trace.load(path)


def test_rows_with_gaps_between_their_steps_keep_their_places(tmp_path):
    """After a pause a run may go on at any step; flags and names stay with it."""
    steps = [3, 4, 9, 2**40]
    with Recorder(tmp_path / "run.buoy") as recorder:
        for step in steps:
            bad = ("a",) if step == 9 else ()
            recorder.step(step=step, scale=2.0, applied=not bad, offenders=bad)
    rows = buoy.trace.load(tmp_path / "run.buoy").rows
    assert [row.step for row in rows] == steps
    assert [row.applied for row in rows] == [True, True, False, True]
    assert [row.offenders for row in rows] == [(), (), ("a",), ()]
    assert buoy.trace.load(tmp_path / "run.buoy", after=4).rows[0].offenders == ("a",)


def test_a_replay_takes_a_bounded_number_of_bytes_per_step(tmp_path):
    """Rows are never held as objects: of a long run these would not fit."""
    path, steps = tmp_path / "run.buoy", 50_000
    with Recorder(path, queue=steps) as recorder:
        for step in range(steps):
            recorder.step(scale=8.0, applied=True, amax=2.0 ** -(step % 7), loss=1.5)
    tracemalloc.start()
    try:
        buoy.replay(buoy.trace.read(path), ["torch", "headroom"])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak / steps < 160


@settings(max_examples=20)
@given(rows=ROWS)
def test_columns_hold_what_the_rows_hold(rows):
    """Rows that were made by hand, and the headroom that is computed by column."""
    rows = [row | {"offenders": tuple(row["offenders"])} for row in rows]
    made = [Row(step, **row) for step, row in enumerate(rows)]
    columns = Rows.of(made)
    assert columns == made
    assert columns.skipped == [row.step for row in made if not row.applied]
    found = [None if math.isnan(bits) else bits for bits in columns.headroom]
    assert found == [row.headroom for row in made]


def test_nan_is_not_the_same_as_not_measured(tmp_path):
    """A skipped step's norm is NaN; a step that nobody measured has none."""
    with Recorder(tmp_path / "run.buoy") as recorder:
        recorder.step(scale=2.0, applied=False, norm=math.nan, loss=math.inf)
    row = buoy.trace.load(tmp_path / "run.buoy").rows[0]
    assert math.isnan(row.norm)
    assert (row.loss, row.amax, row.headroom) == (math.inf, None, None)


def test_headroom_is_in_bits_below_the_formats_maximum():
    """65504 is 1 bit above 32752; of another format it is that one's maximum."""
    assert Row(0, 2.0, True, amax=16376.0).headroom == pytest.approx(1.0)
    wide = Row(0, 2.0, True, amax=1.0, max_log2=8.0)
    assert wide.headroom == 7.0
    assert Row(0, 2.0, False, amax=math.inf).headroom is None


@given(
    st.dictionaries(
        st.integers(0, 9),
        st.builds(
            Counts,
            low=st.integers(-126, 127),
            counts=st.lists(st.integers(0, 2**32 - 1), max_size=40).map(tuple),
            zeros=st.integers(0, 2**32 - 1),
            nonfinite=st.integers(0, 9),
            size=st.just(7),
        ),
    )
)
def test_histograms_come_back_as_they_went_in(tensors):
    """Packing loses nothing."""
    known = {number: (str(number), 7, "weight") for number in range(10)}
    read = unpack(pack(tensors), known)
    assert read == {str(number): seen for number, seen in tensors.items()}


@pytest.mark.slow
def test_a_hundred_thousand_steps_take_less_than_a_hundred_bytes_each(tmp_path):
    """With every column measured, no two alike, and one in a hundred skipped."""
    path = tmp_path / "run.buoy"
    steps = 100_000
    with Recorder(path, queue=2 * steps) as recorder:
        for i in range(steps):
            recorder.step(
                scale=1000.1 + i,
                applied=i % 100 != 0,
                norm=1.1 / (i + 1),
                amax=1.3 / (i + 1),
                loss=3.3 / (i + 1),
                offenders=() if i % 100 else ("a.weight", "b.weight"),
            )
    assert recorder.lost == 0
    assert len(buoy.trace.load(path).rows) == steps
    assert path.stat().st_size / steps <= 100
    assert [file.name for file in tmp_path.iterdir()] == ["run.buoy"]


def test_histograms_stay_within_their_budget_and_thin_out_with_age(tmp_path):
    """The first and the latest stay; in between the old ones lie further apart."""
    path = tmp_path / "run.buoy"
    budget = 200_000
    names = [f"layer.{i}" for i in range(50)]
    with Recorder(path, budget=budget) as recorder:
        for step in range(0, 40_000, 100):
            seen = {
                name: Counts(-20, tuple((step * 7 + i * k) % 997 for k in range(30)))
                for i, name in enumerate(names)
            }
            recorder.histograms(step, 2.0, seen)
            recorder.flush()
    shots = buoy.trace.load(path).shots
    steps = [shot.step for shot in shots]
    file = sqlite3.connect(path)
    kept = file.execute("SELECT sum(length(packed)) FROM histograms").fetchone()[0]
    file.close()
    assert kept <= budget
    assert (steps[0], steps[-1]) == (0, 39_900)
    gaps = [b - a for a, b in pairwise(steps)]
    assert gaps[0] > gaps[-1] == 100
    assert path.stat().st_size <= 3 * budget


def test_a_run_can_be_read_while_it_goes_on(tmp_path):
    """And only what is new, if that is asked for."""
    path = tmp_path / "run.buoy"
    with Recorder(path) as recorder:
        for i in range(5):
            recorder.step(scale=2.0**i, applied=True)
        recorder.flush()
        assert [row.step for row in buoy.trace.load(path).rows] == [0, 1, 2, 3, 4]
        assert not buoy.trace.load(path).ended
        recorder.step(scale=1.0, applied=True)
        recorder.flush()
        assert [row.step for row in buoy.trace.load(path, after=4).rows] == [5]
    assert buoy.trace.load(path).ended


def test_what_was_said_about_the_run_is_in_the_file(tmp_path):
    """Versions and format by themselves, the rest as given."""
    with Recorder(tmp_path / "run.buoy", meta={"model": "gpt"}) as recorder:
        recorder.describe(note=[1, 2])
    meta = buoy.trace.load(tmp_path / "run.buoy").meta
    assert (meta["model"], meta["note"], meta["format"]) == ("gpt", [1, 2], "fp16")
    assert {"buoy", "python", "started", "ended"} <= set(meta)


def test_a_run_whose_file_exists_takes_the_next_number(tmp_path, caplog):
    """Nothing recorded is ever overwritten, and the log has one line about it."""
    path = tmp_path / "run.buoy"
    for scale in (1.0, 2.0, 3.0):
        with Recorder(path) as recorder:
            recorder.step(scale=scale, applied=True)
            recorder.flush()
            recorder.step(scale=scale, applied=True)
    names = ("run.buoy", "run-2.buoy", "run-3.buoy")
    found = [buoy.trace.load(tmp_path / name).rows[1].scale for name in names]
    assert found == [1.0, 2.0, 3.0]
    assert recorder.path == tmp_path / "run-3.buoy"
    assert caplog.messages == [
        f"{path} exists; this run is recorded in {tmp_path / name}"
        for name in names[1:]
    ]


def test_a_run_that_is_still_being_recorded_keeps_its_file(tmp_path):
    """The second one takes another name."""
    path = tmp_path / "run.buoy"
    with Recorder(path) as first:
        first.step(scale=1.0, applied=True)
        first.flush()
        with Recorder(path) as second:
            second.step(scale=2.0, applied=True)
            second.flush()
        first.step(scale=1.0, applied=True)
    assert second.path == tmp_path / "run-2.buoy"
    assert len(buoy.trace.load(path).rows) == 2
    assert buoy.trace.load(second.path).rows[0].scale == 2.0


@pytest.mark.parametrize("kind", ["text", "pipe", "link"])
def test_somebody_elses_file_is_left_alone(tmp_path, kind):
    """It is not even opened: a pipe would block, a link lead elsewhere."""
    path, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    if kind == "text":
        path.write_text("do not touch")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(elsewhere)
    with Recorder(path) as recorder:
        recorder.step(scale=1.0, applied=True)
    assert recorder.path == tmp_path / "run-2"
    assert len(buoy.trace.load(recorder.path).rows) == 1
    assert not elsewhere.exists()
    if kind == "text":
        assert path.read_text() == "do not touch"


def test_a_folder_in_place_of_a_file_is_refused(tmp_path):
    """Most likely the name of a file in it is missing."""
    with pytest.warns(TraceWarning, match="is a folder; name a file in it"):  # noqa: SIM117
        with Recorder(tmp_path / "..") as recorder:
            recorder.step(scale=1.0, applied=True)


def test_verdicts_are_kept_by_name(tmp_path):
    """Every one of them, and a wrong one is refused at once."""
    with Recorder(tmp_path / "run.buoy") as recorder:
        for verdict in Verdict:
            recorder.step(scale=1.0, applied=verdict == "applied", verdict=verdict)
        with pytest.raises(ValueError, match="because"):
            recorder.step(scale=1.0, applied=False, verdict="because")
    rows = buoy.trace.load(tmp_path / "run.buoy").rows
    assert [row.verdict for row in rows] == list(Verdict)


def test_a_recorded_run_can_be_replayed_and_tuned(tmp_path):
    """Sizes in log2; an overflow is taken to be just above that step's limit."""
    path = tmp_path / "run.buoy"
    with Recorder(path) as recorder:
        recorder.step(scale=2.0**10, applied=True, amax=0.5, loss=4.0)
        recorder.step(scale=2.0**10, applied=True, loss=2.0)
        recorder.step(scale=2.0**18, applied=False, amax=math.inf, loss=2.0)
        recorder.step(scale=2.0, applied=False, verdict="forward_nonfinite")
        recorder.histograms(1, 2.0**10, {"w": Counts(-4, (1, 3), zeros=2, size=12)})
    trace = buoy.trace.read(path)
    assert trace.amax_log2[:2] == (-1.0, -1.0)
    assert -2.01 < trace.amax_log2[2] < -1.0 or trace.amax_log2[2] == -1.0
    assert trace.amax_log2[3] == math.inf
    assert trace.loss_log2 == (2.0, 1.0, 1.0, math.inf)  # the last one failed
    assert trace.weight_histograms == (buoy.Histogram(1, -14, (2.0, 6.0)),)
    torch_, fixed = buoy.replay(trace, ["torch", buoy.Static(init_scale=2.0**10)])
    assert (torch_.skipped, fixed.skipped) == (1, 1)
    assert buoy.tune(trace).static is not None


def test_a_run_without_sizes_says_why_it_cannot_be_replayed(tmp_path):
    """Nothing measured, nothing to replay."""
    with Recorder(tmp_path / "run.buoy") as recorder:
        recorder.step(scale=1.0, applied=True)
    with pytest.raises(TraceError, match="measured in none"):
        buoy.trace.read(tmp_path / "run.buoy")


FORKED = """
import os, sys
from buoy.trace import Recorder

with Recorder(sys.argv[1]) as recorder:
    recorder.step(scale=1.0, applied=True)
    recorder.flush()
    child = os.fork()
    if not child:
        recorder.step(scale=9.0, applied=True)
        recorder.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    recorder.step(scale=2.0, applied=True)
"""


def test_a_forked_child_leaves_the_parents_file_alone(tmp_path):
    """Data loaders fork; the copy of a recorder in there must do nothing."""
    path = tmp_path / "run.buoy"
    subprocess.run([sys.executable, "-c", FORKED, str(path)], check=True)
    assert [row.scale for row in buoy.trace.load(path).rows] == [1.0, 2.0]
