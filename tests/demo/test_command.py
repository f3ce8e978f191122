"""`buoy demo` as people run it: in a process of its own, interrupted by Ctrl-C."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import buoy

pytestmark = pytest.mark.slow  # starts processes

SOURCE = str(Path(buoy.__file__).parents[1])


def command(*arguments):
    """Write the command."""
    return [sys.executable, "-m", "buoy", "demo", *arguments]


def environment():
    return {**os.environ, "PYTHONPATH": SOURCE, "COLUMNS": "80"}


def ran(*arguments, cwd, code=0):
    """Run the command to its end."""
    done = subprocess.run(
        command(*arguments), capture_output=True, text=True, check=False,
        env=environment(), cwd=cwd,
    )  # fmt: skip
    assert code == done.returncode, done.stderr
    return done


@pytest.mark.long
def test_two_runs_say_the_same(tmp_path):
    """All of the JSON, with a policy of one's own beside the seven columns."""
    arguments = ("bandit", "--steps", "10", "--seeds", "2", "--json",
                 "--policy", "backoff:init_scale=2^10")  # fmt: skip
    first, second = (json.loads(ran(*arguments, cwd=tmp_path).stdout) for _ in range(2))

    assert first == second
    assert "buoy-demo.html" == first["report"]
    (workload,) = first["workloads"]
    names = [column["name"] for column in workload["columns"]]
    assert "backoff:init_scale=2^10" == names[-1]
    assert ["fp32", "none", "torch", "buoy"] == [names[i] for i in (0, 1, 5, 6)]
    assert [[0, 1]] * 8 == [column["seeds"] for column in workload["columns"]]
    assert first["interrupted"] is False


def test_the_table_fits_a_terminal_and_says_what_it_shows(tmp_path):
    """Within 80 columns; progress goes to stderr, a line per training."""
    done = ran("field-1e-3", "--steps", "5", "--seeds", "1", cwd=tmp_path)

    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "field-1e-3" in done.stdout
    assert "over 2 % worse than FP32" in done.stdout
    assert "7/7" in done.stderr
    assert "Report: buoy-demo.html (open it in a browser)." in done.stdout
    assert "</html>" in (tmp_path / "buoy-demo.html").read_text()


def test_ctrl_c_leaves_a_report_of_what_there_is(tmp_path):
    """A real SIGINT to the whole group, as a terminal sends it, in mid-training."""
    process = subprocess.Popen(
        command("field", "--steps", "60", "--json", "--out", "part.html"),
        env=environment(), cwd=tmp_path, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while "1/63" not in (line := process.stderr.readline()):
        assert line, "the demo ended before its first training"
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)

    assert 130 == process.returncode
    assert "Traceback" not in err
    said = json.loads(out)
    assert said["interrupted"] is True
    columns = [c for w in said["workloads"] for c in w["columns"]]
    steps = [count for column in columns for count in column["steps"]]
    assert 1 <= len(steps) < 63
    assert 60 in steps  # the training that was reported before Ctrl-C
    page = (tmp_path / "part.html").read_text()
    assert "What loss scaling does (stopped early)" in page
    assert "Stopped early. Results so far:" in page


def test_a_terminal_sees_the_table_fill(tmp_path):
    """Live, on stderr; stdout is left for what is piped on."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        command("bandit", "--steps", "2", "--seeds", "1", "--json"),
        env={**environment(), "TERM": "xterm"}, cwd=tmp_path,
        stdin=slave, stdout=subprocess.PIPE, stderr=slave,
    )  # fmt: skip
    os.close(slave)
    shown = b""
    with contextlib.suppress(OSError):  # how the end of a terminal is told
        while part := os.read(master, 4096):
            shown += part
    out, _ = process.communicate(timeout=60)
    os.close(master)

    assert 0 == process.returncode
    assert json.loads(out)["interrupted"] is False
    assert b"7/7" in shown
    assert b"bandit" in shown


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["fields"], 2, "There is no workload 'fields'. There are field-1,"),
        (["bandit", "--steps", "0"], 2, "--steps"),
        (["bandit", "--policy", "torhc"], 1, "Did you mean 'torch'?"),
    ],
)
def test_mistakes_are_told_before_anything_is_trained(arguments, code, said, tmp_path):
    """On stderr, without a traceback."""
    done = ran(*arguments, cwd=tmp_path, code=code)

    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert "" == done.stdout
