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
    assert "Training goes on" in err
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
