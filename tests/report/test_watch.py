"""`buoy watch`: with and without a terminal, on runs that go on and that have ended."""

import json
import os
import pty
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from invented import record

import buoy
from buoy.report.watch import Follower, sparkline
from buoy.trace import Recorder

SOURCE = str(Path(buoy.__file__).parents[1])
ENV = {**os.environ, "PYTHONPATH": SOURCE, "COLUMNS": "80", "TERM": "xterm-256color"}
WATCH = [sys.executable, "-m", "buoy", "watch"]

# Records forty steps, and another one for every line that it is sent.
RUN = """
import sys
from buoy.trace import Recorder
with Recorder(sys.argv[1]) as recorder:
    for step in range(40):
        recorder.step(scale=2.0**10, applied=step > 1, amax=0.5, loss=1.5)
    recorder.flush()
    print("there", flush=True)
    for line in sys.stdin:
        recorder.step(scale=2.0**11, applied=True, amax=0.25, loss=0.5)
        recorder.flush()
"""


def watched(*arguments, **options):
    """Run the command to its end."""
    return subprocess.run(
        [*WATCH, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**ENV, **options},
    )


@pytest.fixture
def going_on(tmp_path):
    """Start a run that goes on until its input is closed."""
    path = tmp_path / "run.buoy"
    run = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(RUN), str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=ENV,
    )
    assert run.stdout.readline() == "there\n"
    yield path, run
    run.communicate()


def test_one_frame_shows_the_figures_and_fits(tmp_path):
    """Scale, skips, headroom, underflow, the worst layers; in 80 columns."""
    path = record(tmp_path / "run.buoy", 1000)
    done = watched(path, "--once")
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 80
    for words in ("2^14", "3 (0.3 %)", "headroom", "embed.weight", "subnormal"):
        assert words in done.stdout
    assert "step 500 skipped at 2^14: forward_nonfinite" in done.stdout
    plain = watched(path, "--once", PYTHONIOENCODING="ascii").stdout
    assert plain.isascii()
    assert "2^14" in plain


def test_json_is_one_object(tmp_path):
    """The same figures, for a program."""
    path = record(tmp_path / "run.buoy", 1000)
    said = json.loads(watched(path, "--once", "--json").stdout)
    assert (said["steps"], said["skipped"], said["last_scale"]) == (1000, 3, 2.0**14)
    assert said["layers"][0]["name"] == "embed.weight"


def test_without_a_terminal_it_prints_lines_until_the_run_ends(going_on):
    """One line for what is there, one for each piece of news, then it ends."""
    path, run = going_on
    watch = subprocess.Popen(
        [*WATCH, str(path), "--every", "0.05"],
        stdout=subprocess.PIPE,
        text=True,
        env=ENV,
    )
    first = watch.stdout.readline()
    assert first.startswith("step 39, scale 2^10, skipped 2 (5 %), headroom 7.0 bits")
    run.stdin.write("go on\n")
    run.stdin.flush()
    assert watch.stdout.readline().startswith("step 40, scale 2^11")
    run.communicate()
    rest, _ = watch.communicate(timeout=60)
    assert watch.returncode == 0
    assert all(line.startswith("step 40") for line in rest.splitlines())


def test_in_a_terminal_it_draws_until_the_run_ends(going_on):
    """Frames with the scale in them, over a real terminal."""
    path, run = going_on
    ours, theirs = pty.openpty()
    watch = subprocess.Popen(
        [*WATCH, str(path), "--every", "0.05"], stdout=theirs, stderr=theirs, env=ENV
    )
    os.close(theirs)
    drawn = b""
    while b"2^10" not in drawn:
        drawn += os.read(ours, 4096)
    run.stdin.write("go on\n")
    run.stdin.flush()
    while b"2^11" not in drawn:
        drawn += os.read(ours, 4096)
    run.communicate()
    try:
        while data := os.read(ours, 4096):
            drawn += data
    except OSError:  # the terminal is closed when its last process ends
        pass
    os.close(ours)
    assert watch.wait(60) == 0
    assert b"ended" in drawn


def test_watching_waits_for_a_run_that_has_not_started(tmp_path):
    """And says so; asked for one frame only, it is an error."""
    path = tmp_path / "run.buoy"
    done = watched(path, "--once")
    assert done.returncode == 1
    assert "There is no trace" in done.stderr
    watch = subprocess.Popen(
        [*WATCH, str(path), "--every", "0.05"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENV,
    )
    assert watch.stderr.readline().startswith("Waiting for")
    with Recorder(path) as recorder:
        recorder.step(scale=8.0, applied=True)
    out, _ = watch.communicate(timeout=60)
    assert "step 0, scale 2^3" in out


def test_following_counts_every_step_once(tmp_path):
    """However often it looks, totals are those of the file."""
    with Recorder(tmp_path / "run.buoy") as recorder:
        follower = Follower(str(tmp_path / "run.buoy"))
        for part in range(3):
            for i in range(10):
                recorder.step(scale=1.0, applied=i > 0)
            recorder.flush()
            assert follower.look()
            assert not follower.look()
            assert (follower.steps, follower.skipped) == (10 * part + 10, part + 1)
    assert follower.look()
    assert follower.recording.ended


@given(st.lists(st.one_of(st.none(), st.floats()), max_size=200), st.integers(1, 60))
def test_sparklines_never_fail_and_never_overflow(values, width):
    """Whatever the numbers, at most so many characters."""
    assert len(sparkline(values, width)) <= width
