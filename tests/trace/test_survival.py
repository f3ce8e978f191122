"""A trace survives the run's death, and the run survives the trace's."""

import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import buoy.trace
from buoy.trace import Recorder, TraceWarning

SOURCE = str(Path(buoy.__file__).parents[1])


def start(code: str, **kwargs) -> subprocess.Popen:
    """Run code in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-W", "always", "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": SOURCE},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **kwargs,
    )


def test_a_killed_run_leaves_all_but_its_last_moments(tmp_path):
    """SIGKILL while rows are being written: the file opens, and holds them."""
    path = tmp_path / "run.buoy"
    run = start(
        f"""
        from buoy.trace import Recorder
        recorder = Recorder({str(path)!r})
        for i in range(1000):
            recorder.step(scale=2.0, applied=True, amax=1.0, norm=float(i))
        recorder.flush()
        print("flushed", flush=True)
        while True:
            recorder.step(scale=4.0, applied=True)
        """
    )
    assert run.stdout.readline() == "flushed\n"
    run.send_signal(signal.SIGKILL)
    run.communicate()
    recording = buoy.trace.load(path)
    assert len(recording.rows) >= 1000
    assert [row.norm for row in recording.rows[:1000]] == list(range(1000))
    assert not recording.ended
    assert len(buoy.trace.read(path)) == len(recording.rows)


def test_a_run_that_just_ends_leaves_everything(tmp_path):
    """Nobody has to call `close`: one plain file is there in the end."""
    path = tmp_path / "run.buoy"
    run = start(
        f"""
        from buoy.trace import Recorder
        recorder = Recorder({str(path)!r})
        for i in range(10):
            recorder.step(scale=2.0, applied=True)
        """
    )
    assert run.communicate() == ("", "")
    assert len(buoy.trace.load(path).rows) == 10
    assert os.listdir(tmp_path) == ["run.buoy"]  # noqa: PTH208


def test_a_full_disk_costs_the_trace_and_not_the_run(tmp_path):
    """No file may grow beyond 64 KiB: the loop ends well, with one warning."""
    path = tmp_path / "run.buoy"
    run = start(
        f"""
        import resource
        from buoy.trace import Recorder
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
        recorder = Recorder({str(path)!r})
        for part in range(40):
            for i in range(500):
                recorder.step(scale=2.0, applied=True, norm=1.0 / (i + 1))
            recorder.flush()
        recorder.close()
        print("trained")
        """
    )
    out, err = run.communicate()
    assert (run.returncode, out) == (0, "trained\n")
    assert err.count("TraceWarning") == 1
    assert "Training continues" in err
    assert 0 < len(buoy.trace.load(path).rows) < 20_000


def test_a_folder_that_may_not_be_written_costs_the_trace_and_not_the_run(tmp_path):
    """As a user without rights there: one warning, and the loop ends well."""
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o555)
    run = start(
        f"""
        import os
        from buoy.trace import Recorder
        Recorder(None).close()  # everything is imported that an owner alone may read
        if os.getuid() == 0:
            os.setuid(65534)
        recorder = Recorder({str(folder / "run.buoy")!r})
        recorder.step(scale=2.0, applied=True)
        recorder.flush()
        for _ in range(100):
            recorder.step(scale=2.0, applied=True)
        recorder.close()
        print("trained")
        """
    )
    out, err = run.communicate()
    assert (run.returncode, out) == (0, "trained\n"), err
    assert err.count("TraceWarning") == 1
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", ["missing/run.buoy", "file/run.buoy"])
def test_a_path_that_leads_nowhere_costs_the_trace_alone(tmp_path, name):
    """One warning from the thread that trains, and no more."""
    (tmp_path / "file").write_text("")
    recorder = Recorder(tmp_path / name)
    recorder.step(scale=2.0, applied=True)
    with pytest.warns(TraceWarning, match="has stopped"):
        recorder.flush()
    recorder.step(scale=2.0, applied=True)
    recorder.close()


def test_a_disk_that_stands_still_costs_rows_and_not_time(tmp_path):
    """While the file is held nothing is written, nothing waits, losses are counted."""
    path = tmp_path / "run.buoy"
    recorder = Recorder(path, queue=100)
    recorder.step(scale=2.0, applied=True)
    recorder.flush()
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    for _ in range(1000):
        recorder.step(scale=2.0, applied=True)
    assert recorder.lost >= 700
    holder.execute("ROLLBACK")
    holder.close()
    recorder.close()
    recording = buoy.trace.load(path)
    assert len(recording.rows) == 1001 - recorder.lost
    assert recording.lost == recorder.lost


def go(runs):
    """Let processes go on that wait for a line."""
    for run in runs:
        run.stdin.write("\n")
        run.stdin.flush()


def test_runs_that_start_on_one_file_at_the_same_time_keep_theirs(tmp_path):
    """Every run finds all its rows under one of the names, next to the earlier one."""
    path = tmp_path / "run.buoy"
    with Recorder(path, meta={"name": "earlier"}) as recorder:
        recorder.step(scale=2.0, applied=True)
    runs = [
        start(
            f"""
            import sys, warnings
            from buoy.trace import Recorder
            warnings.simplefilter("error")
            print("ready", flush=True)
            sys.stdin.readline()
            recorder = Recorder({str(path)!r}, meta={{"name": "{number}"}})
            for step in range(50):
                recorder.step(scale=2.0, applied=True, loss={number})
            recorder.flush()
            print(recorder.path, flush=True)
            sys.stdin.readline()
            for step in range(50):
                recorder.step(scale=2.0, applied=True, loss={number})
            recorder.close()
            """,
            stdin=subprocess.PIPE,
        )
        for number in range(6)
    ]
    for run in runs:
        assert run.stdout.readline() == "ready\n"
    go(runs)
    names = [run.stdout.readline().strip() for run in runs]
    go(runs)
    told = [run.communicate()[1] for run in runs]
    assert told == [
        f"{path} exists; this run is recorded in {name}\n" for name in names
    ]
    for number, name in enumerate(names):
        recording = buoy.trace.load(name)
        assert recording.meta["name"] == str(number)
        assert [row.loss for row in recording.rows] == [number] * 100
        assert recording.ended
    every = {buoy.trace.load(found).name for found in tmp_path.glob("run*.buoy")}
    assert every == {"earlier", *map(str, range(6))}
    assert len(os.listdir(tmp_path)) == 7  # noqa: PTH208 - and no lock


@pytest.mark.parametrize("end", ["goes on", "is killed"])
@pytest.mark.parametrize("how", ["deleted", "moved"])
def test_a_run_that_loses_its_file_does_no_harm_to_the_next_one(tmp_path, how, end):
    """SQLite finds the log beside a file by its name, and both have the same."""
    path = tmp_path / "run.buoy"
    first = start(
        f"""
        import sys
        from buoy.trace import Recorder
        recorder = Recorder({str(path)!r})
        for _ in range(500):
            recorder.step(scale=1.0, applied=True)
        recorder.flush()
        print("flushed", flush=True)
        sys.stdin.readline()
        recorder.step(scale=1.0, applied=True)
        recorder.close()
        """,
        stdin=subprocess.PIPE,
    )
    assert first.stdout.readline() == "flushed\n"
    if end == "is killed":
        first.kill()
        first.wait()
    if how == "deleted":
        path.unlink()
    else:
        path.rename(tmp_path / "kept.buoy")
    with Recorder(path) as second:
        second.step(scale=2.0, applied=True)
        second.flush()
        if end == "goes on":
            go([first])
        assert ("moved or replaced" in first.communicate()[1]) == (end == "goes on")
        for _ in range(3):
            second.step(scale=2.0, applied=True)
            second.flush()
    assert second.path == path
    assert [row.scale for row in buoy.trace.load(path).rows] == [2.0] * 4


@pytest.mark.parametrize(
    "breaking",
    [
        lambda recorder: recorder.step(scale=2.0, applied=True, step=2**63),
        lambda recorder: recorder.step(scale="two", applied=True),
        lambda recorder: recorder.step(scale=2.0, applied=True, offenders=["\ud800"]),
        lambda recorder: recorder.path.unlink(),
        lambda recorder: recorder.path.rename(recorder.path.with_name("b.buoy")),
    ],
    ids=["step", "scale", "name", "deleted", "moved"],
)
def test_whatever_stops_the_file_is_told_once(tmp_path, breaking):
    """Values that SQLite has no place for; a file that is gone."""
    recorder = Recorder(tmp_path / "run.buoy")
    recorder.step(scale=2.0, applied=True)
    recorder.flush()

    def go_on():
        breaking(recorder)
        for _ in range(3):
            recorder.step(scale=2.0, applied=True)
            recorder.flush()
        recorder.close()

    with pytest.warns(TraceWarning, match="has stopped") as told:
        go_on()
    assert len(told) == 1


def test_whatever_is_noted_about_a_run_is_kept(tmp_path):
    """What JSON has no form for becomes text, and costs nothing else."""
    circle: list = []
    circle.append(circle)
    meta = {"path": tmp_path, "set": {1}, "keys": {(1, 2): 3}, "circle": circle, 7: 8}
    with Recorder(tmp_path / "run.buoy", meta=meta) as recorder:
        recorder.step(scale=2.0, applied=True)
        recorder.describe(model=object)
    recording = buoy.trace.load(recorder.path)
    assert len(recording.rows) == 1
    assert recording.meta["path"] == str(tmp_path)
    assert recording.meta["keys"] == "{(1, 2): 3}"
    assert recording.meta["circle"] == "[[...]]"
    assert recording.meta["7"] == 8


def test_histograms_that_cannot_be_made_cost_only_themselves(tmp_path):
    """The function that counts runs in the writing thread; it may fail there."""

    def exits():
        raise SystemExit(3)

    recorder = Recorder(tmp_path / "run.buoy")
    recorder.histograms(0, 2.0, exits)
    recorder.step(scale=2.0, applied=True)
    with pytest.warns(TraceWarning, match=r"step 0: SystemExit: 3"):
        recorder.close()
    assert len(buoy.trace.load(recorder.path).rows) == 1


def test_a_script_that_just_ends_hears_what_was_lost(tmp_path):
    """No step comes after the fault, and no `close`."""
    run = start(
        f"""
        from buoy.trace import Recorder
        recorder = Recorder({str(tmp_path / "run.buoy")!r})
        recorder.step(scale=2.0, applied=True, step=2**63)
        """
    )
    _, errors = run.communicate()
    assert errors.count("TraceWarning") == 1
    assert "OverflowError" in errors
