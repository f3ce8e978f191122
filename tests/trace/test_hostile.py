"""Files made to do harm: they cost an error message, and no more."""

import gzip
import json
import os
import sqlite3
import subprocess
import sys
import zlib
from contextlib import closing
from pathlib import Path

import pytest

import buoy
import buoy.trace
from buoy import TraceError
from buoy.trace import Counts, Recorder
from buoy.trace.counts import pack

SOURCE = str(Path(buoy.__file__).parents[1])
NAME = "layer\x1b]0;owned\x07\x1b[2J\x1b]8;;http://evil\x07\u202ecod"
RUN = "import sys; from buoy.cli import main; sys.exit(main())"


def buoy_command(*arguments, cwd, memory=None, timeout=120):
    """Run the command in a process of its own, with that much memory."""
    # Not by `preexec_fn`: it forks, and JAX warns of that where it was imported.
    limit = f"import resource as r; r.setrlimit(r.RLIMIT_AS, ({memory},) * 2); "
    code = (limit if memory else "") + RUN
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": SOURCE, "OPENBLAS_NUM_THREADS": "1"},
        cwd=cwd,
        capture_output=True,
        timeout=timeout,
        check=False,
    )


@pytest.fixture
def hostile(tmp_path):
    """Record a run whose every name drives a terminal."""
    path = tmp_path / "run.buoy"
    with Recorder(path, meta={"name": NAME, "model": NAME}) as recorder:
        for step in range(40):
            bad = step % 2
            recorder.step(
                scale=2.0,
                applied=not bad,
                verdict="forward_nonfinite" if bad else None,
                offenders=[NAME] if bad else (),
                amax=1e-7,
            )
        seen = Counts(low=-24, counts=(9, 1), zeros=1, size=11)
        recorder.histograms(38, 2.0, {NAME: seen})
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [["report"], ["watch", "--once"], ["replay"], ["tune"], ["replay", "--json"]],
    ids=" ".join,
)
def test_names_never_drive_the_terminal(hostile, command):
    """No escape sequence, no bell, no text that runs backwards."""
    done = buoy_command(command[0], hostile, *command[1:], cwd=hostile.parent)
    shown = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, shown
    assert "cod" in shown or command[0] == "tune"
    assert not [c for c in shown if c != "\n" and not c.isprintable()]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["report", "watch", "replay", "tune"])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path, command):
    """Nobody will ever write into it."""
    os.mkfifo(tmp_path / "run.buoy")
    done = buoy_command(command, "run.buoy", cwd=tmp_path, timeout=60)
    assert done.returncode == 1
    assert b"not a plain file" in done.stderr


def test_a_link_that_lies_in_wait_is_not_followed(hostile):
    """Whoever guesses the name of a temporary file gains nothing."""
    folder = hostile.parent
    (folder / "precious").write_text("mine")
    for name in ("report.html.part", "report.html", "t.json.part"):
        (folder / name).symlink_to(folder / "precious")
    pytest.importorskip("bokeh")
    from buoy.report import write

    write([hostile], folder / "report.html")
    buoy.trace.write(buoy.trace.read(hostile), folder / "t.json")
    assert (folder / "precious").read_text() == "mine"
    assert not (folder / "report.html").is_symlink()
    assert not [name for name in os.listdir(folder) if name.startswith(".")]  # noqa: PTH208


def test_a_device_is_not_replaced(tmp_path):
    """As root, a page written to /dev/null would take its place."""
    os.mkfifo(tmp_path / "null")
    trace = buoy.trace.synthetic("noise", steps=10)
    with pytest.raises(TraceError, match=r"Cannot write the trace .*null.*pipe"):
        buoy.trace.write(trace, tmp_path / "null")
    assert (tmp_path / "null").is_fifo()


def test_files_get_the_usual_rights(tmp_path):
    """Not those of a temporary file, which only its owner may read."""
    old = os.umask(0o022)
    try:
        buoy.trace.write(buoy.trace.synthetic("noise", steps=9), tmp_path / "t.json")
    finally:
        os.umask(old)
    assert (tmp_path / "t.json").stat().st_mode & 0o777 == 0o644


def test_histograms_that_unpack_to_gigabytes_are_refused(hostile):
    """Each is within bounds; together they are not."""
    bomb = zlib.compress(pack_zeros(), 9)
    file = sqlite3.connect(hostile)
    file.executemany(
        "INSERT INTO histograms VALUES (?, 1.0, ?)",
        [(k, bomb) for k in range(100, 109)],
    )
    for k in range(1, 2000):
        file.execute("INSERT INTO tensors VALUES (?, ?, 9, 'weight')", (k, f"t{k}"))
    file.commit()
    file.close()
    with pytest.raises(TraceError, match="larger than any run makes it"):
        buoy.trace.load(hostile)


@pytest.mark.parametrize(
    "change",
    [
        "INSERT INTO offenders VALUES ('x', 0)",
        "UPDATE steps SET applied = 2 WHERE step = 0",
        "UPDATE steps SET verdict = 'fate' WHERE step = 0",
        "UPDATE steps SET time = 'x' WHERE step = 0",
        "UPDATE steps SET scale = x'00' WHERE step = 0",
        "UPDATE steps SET loss = 'inf' WHERE step = 0",
    ],
)
def test_values_of_other_types_are_an_error_that_names_the_entry(hostile, change):
    """SQLite lets any column hold anything."""
    with closing(sqlite3.connect(hostile)) as file, file:
        file.execute(change)
    with pytest.raises(TraceError, match=r"the entry ('x'|0) of its table"):
        buoy.trace.load(hostile)


def pack_zeros() -> bytes:
    """Make a snapshot of 2,000 tensors with 4,000 empty binades each."""
    seen = Counts(low=-2000, counts=(0,) * 4000, size=9)
    return zlib.decompress(pack(dict.fromkeys(range(2000), seen)))


def test_a_tensor_counts_once_in_a_snapshot(hostile):
    """Else a few bytes unpack to any number of objects."""
    twice = zlib.compress(zlib.decompress(pack({0: Counts(low=0, counts=(1,))})) * 2)
    file = sqlite3.connect(hostile)
    file.execute("UPDATE histograms SET packed = ?", (twice,))
    file.commit()
    file.close()
    with pytest.raises(TraceError, match="counts a tensor twice"):
        buoy.trace.load(hostile)


@pytest.mark.slow
@pytest.mark.parametrize("filling", ["[],", "1,"])
def test_packed_json_of_a_few_kilobytes_stays_within_a_gigabyte(tmp_path, filling):
    """Nested lists take twenty times their text in memory."""
    head = b'{"buoy_trace":1,"amax_log2":['
    body = filling.encode() * (80 * 2**20 // len(filling)) + b"0]}"
    (tmp_path / "t.json.gz").write_bytes(gzip.compress(head + body, 1))
    done = buoy_command("replay", "t.json.gz", cwd=tmp_path, memory=3 * 2**29)
    assert done.returncode == 1
    assert b"more values or lists" in done.stderr


def test_lines_are_not_kept_as_objects(tmp_path):
    """A trace by lines is read line by line."""
    header = json.dumps({"buoy_trace": 1})
    lines = '{"amax_log2":-3.5,"loss_log2":"-inf"}\n' * 300
    (tmp_path / "t.jsonl").write_text(f"{header}\n{lines}")
    trace = buoy.trace.read(tmp_path / "t.jsonl")
    assert trace.amax_log2 == (-3.5,) * 300
    assert trace.loss_log2 == (float("-inf"),) * 300


def test_huge_steps_and_skips_without_a_verdict_make_a_page(hostile):
    """No file of ours, but a readable one."""
    pytest.importorskip("bokeh")
    from buoy.report import sum_up, write

    file = sqlite3.connect(hostile)
    file.execute("UPDATE steps SET step = step + 1099511627776")
    file.execute("UPDATE steps SET verdict = NULL")
    file.execute("UPDATE offenders SET step = step + 1099511627776")
    file.commit()
    file.close()
    found = sum_up(buoy.trace.load(hostile))
    assert found.verdicts == {buoy.Verdict.SCALE_TOO_HIGH: 20}
    page = write([hostile], hostile.with_suffix(".html")).read_text()
    assert "Content-Security-Policy" in page
