"""`buoy report`: the page is written, and what is printed is what the files hold."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from invented import record

import buoy

SOURCE = str(Path(buoy.__file__).parents[1])


def command(*arguments, cwd):
    """Run it in a folder."""
    return subprocess.run(
        [sys.executable, "-m", "buoy", "report", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": SOURCE, "COLUMNS": "80"},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Record two runs."""
    folder = tmp_path_factory.mktemp("runs")
    record(folder / "a.buoy", 600)
    record(folder / "b.buoy", 300, seed=1)
    return folder


def test_the_command_says_in_words_what_the_page_says(folder):
    """Where the page is, and how each run fared; in 80 columns."""
    done = command("a.buoy", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert "a: Look into forward_nonfinite." in done.stdout
    assert "3 of 600 steps were skipped" in done.stdout
    assert "The page is report.html." in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "Look into forward_nonfinite" in (folder / "report.html").read_text()


def test_several_runs_with_labels_and_policies(folder):
    """As JSON: one entry a run, in order, and the page holds what was asked for."""
    done = command(
        "a.buoy", "b.buoy", "-l", "first", "--title", "Both", "-o", "both.html",
        "-p", "torch:init_scale=2**10", "--json", cwd=folder,
    )  # fmt: skip
    said = json.loads(done.stdout)
    assert [run["run"] for run in said["runs"]] == ["first", "b"]
    assert [run["steps"] for run in said["runs"]] == [600, 300]
    assert said["runs"][0]["verdicts"] == {"scale_too_high": 2, "forward_nonfinite": 1}
    page = (folder / said["report"]).read_text()
    assert said["bytes"] == len(page.encode())
    assert "torch:init_scale=2**10" in page
    assert "<h1>Both</h1>" in page


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["none.buoy"], 1, "There is no trace"),
        (["a.buoy", "-o", "no/such/folder.html"], 1, "Cannot write the report"),
        (["a.buoy", "-p", "torhc"], 1, "Did you mean 'torch'?"),
        (["a.buoy", "-l", "one", "-l", "two"], 2, "2 labels were given for 1 files"),
        ([], 2, "Missing argument"),
    ],
)
def test_mistakes_are_told(folder, arguments, code, said):
    """One paragraph and the right exit code."""
    done = command(*arguments, cwd=folder)
    assert (done.returncode, done.stdout) == (code, "")
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_a_terminal_shows_what_begins(folder):
    """On a terminal only; what is printed stays as it is."""
    main, other = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "buoy", "report", "a.buoy", "-p", "torch"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=other,
        env={**os.environ, "PYTHONPATH": SOURCE, "TERM": "xterm"},
    )
    printed, _ = process.communicate(timeout=120)
    os.close(other)
    shown = os.read(main, 1 << 16).decode()
    os.close(main)

    assert 0 == process.returncode
    assert b"The page is" in printed
    assert "100%" in shown
    stages = ["Reading a.buoy", "Drawing", "Replaying torch", "oracle", "Writing"]
    found = [shown.index(stage) for stage in stages]
    assert sorted(found) == found
