"""The command line: what it prints, how it ends, what it does not import."""

import json
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import buoy
import buoy.trace
from buoy._core.replay.compare import Replayed
from buoy.trace import Trace

SOURCE = str(Path(buoy.__file__).parents[1])
FRAMEWORKS = ("torch", "jax", "numpy", "keras", "tensorflow")
COMMANDS = (
    ["--help"],
    ["demo", "--help"],
    ["formats"],
    ["policies"],
    ["replay", "synthetic:spikes:steps=200"],
    ["tune", "synthetic:spikes:steps=200"],
)

COMMAND_NAMES = ["demo", "doctor", "formats", "policies", "replay", "report", "run"]
COMMAND_NAMES += ["tune", "watch"]

with_click = pytest.mark.skipif(
    not (find_spec("click") and find_spec("rich")), reason="the extra `cli` is missing"
)

# Finds nothing of what its environment variable names, as if it were not installed.
HIDE = """
import os, sys
from importlib.machinery import PathFinder
class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in os.environ["HIDDEN"].split():
            return None
        return PathFinder.find_spec(name, path, target)
sys.meta_path[:] = [Finder if f is PathFinder else f for f in sys.meta_path]
"""


def run(*arguments: str, code: str | None = None, **env: str) -> Any:
    """Run the command, or code, in an interpreter of its own."""
    start = ["-m", "buoy"] if code is None else ["-c", code]
    return subprocess.run(
        [sys.executable, *start, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "PYTHONPATH": SOURCE, "COLUMNS": "80", **env},
    )


def as_json(*arguments: str) -> Any:
    """Run a command with --json and return what it says, refusing what is not JSON."""
    done = run(*arguments, "--json")
    assert (done.returncode, done.stderr) == (0, "")

    def refuse(token: str) -> None:
        raise AssertionError(token)

    return json.loads(done.stdout, parse_constant=refuse)


@with_click
@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_commands_end_well_and_fit_a_terminal(arguments: list[str]) -> None:
    """Exit code 0, nothing on stderr, no line wider than 80 columns."""
    done = run(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 80


@with_click
@pytest.mark.parametrize("command", COMMAND_NAMES)
def test_every_command_has_help_that_fits(command: str) -> None:
    """`--help` names --json and keeps within 80 columns."""
    done = run(command, "--help")
    assert done.returncode == 0
    assert "--json" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@with_click
@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_commands_import_no_framework(arguments: list[str]) -> None:
    """Neither help nor work needs torch, JAX, NumPy or Keras."""
    code = (
        "import sys; from buoy.cli import main; code = main(); "
        f"print([n for n in {FRAMEWORKS!r} if n in sys.modules], file=sys.stderr); "
        "sys.exit(code)"
    )
    done = run(*arguments, code=code)
    assert (done.returncode, done.stderr.strip()) == (0, "[]")


@with_click
def test_help_does_not_wait_for_rich() -> None:
    """Tables are imported by what prints them."""
    code = (
        "import sys; from buoy.cli import main; main(); "
        "print('rich.table' in sys.modules, file=sys.stderr)"
    )
    assert run("--help", code=code).stderr.strip() == "False"


@pytest.mark.parametrize("hidden", ["click", "rich", "click rich"])
def test_without_the_extra_the_command_says_what_to_install(hidden: str) -> None:
    """It ends with 1 and a line to copy; the library itself still imports."""
    code = HIDE + "import buoy; from buoy.cli import main; sys.exit(main())"
    done = run("--help", code=code, HIDDEN=hidden)
    assert (done.returncode, done.stdout) == (1, "")
    assert 'pip install "buoy-amp[cli]"' in done.stderr
    assert hidden.split(maxsplit=1)[0] in done.stderr
    assert "Traceback" not in done.stderr


@with_click
def test_hiding_nothing_hides_nothing() -> None:
    """The test above can fail: with nothing hidden the command works."""
    code = HIDE + "from buoy.cli import main; sys.exit(main())"
    assert run("--help", code=code, HIDDEN="").returncode == 0


@with_click
def test_policies_lists_every_policy_with_its_parameters() -> None:
    """The list is the registry's, and names defaults."""
    rows = {row["name"]: row for row in as_json("policies")["policies"]}
    assert tuple(rows) == buoy.policies()
    assert rows["torch"]["parameters"]["growth_interval"] == 2000
    assert rows["torch"]["kind"] == "preset"
    assert set(rows["static"]) == {"name", "kind", "source", "summary", "parameters"}


@with_click
def test_policies_can_be_asked_for_by_name() -> None:
    """One name gives one row; a name that is not there fails with a guess."""
    assert [row["name"] for row in as_json("policies", "keras")["policies"]] == [
        "keras"
    ]
    done = run("policies", "kears")
    assert done.returncode == 1
    assert "Did you mean 'keras'?" in " ".join(done.stderr.split())
    assert run("policies", "keras").stdout.startswith("keras: ")


@with_click
def test_formats_are_those_of_the_library() -> None:
    """Every format with its limits."""
    rows = {row["name"]: row for row in as_json("formats")["formats"]}
    assert tuple(rows) == tuple(buoy.FORMATS)
    assert rows["fp16"]["max"] == 65504.0


@with_click
def test_replay_says_what_the_library_says() -> None:
    """Rows in the order given, the same policy twice, parameters as typed."""
    said = as_json(
        "replay",
        "synthetic:drift_down:steps=300,seed=2",
        "-p", "torch:init_scale=2^10,growth_interval=100",
        "-p", "torch",
        "-p", "torch",
        "--policy", "backoff:hysteresis_refill=clean,backoff_factor=1e-3",
    )  # fmt: skip
    names = [row["name"] for row in said["policies"]]
    assert names[1:3] == ["torch", "torch #2"]
    assert said["policies"][0]["first_scale"] == 1024.0
    assert said["policies"][3]["policy"]["backoff_factor"] == 1e-3
    assert said["policies"][3]["policy"]["hysteresis_refill"] == "clean"
    assert said["trace"]["steps"] == 300
    assert said["oracle"]["regret"] == 0.0
    assert {
        "skipped",
        "weight_underflow",
        "final_scale",
        "mean_scale",
        "regret",
    } <= set(said["policies"][0])


@with_click
def test_replay_reads_files_and_writes_infinities_as_strings(tmp_path: Path) -> None:
    """A scale that falls to its floor stays there, and the JSON is still JSON."""
    path = tmp_path / "run.jsonl.gz"
    buoy.trace.write(Trace(amax_log2=(math.nan,) * 300), path)
    said = as_json("replay", str(path), "-p", "torch", "-p", "fairseq")
    assert said["policies"][0]["final_scale"] == 2.0**-24
    from buoy.cli.render import plain

    assert plain({"scale": -math.inf}) == {"scale": "-inf"}
    assert said["policies"][0]["weight_underflow"] is None
    assert said["policies"][1]["collapsed_at"] == 28
    text = run("replay", str(path), "-p", "fairseq").stdout
    assert "fairseq gave up at step 28." in text
    assert "no histograms" in text


@with_click
def test_replay_under_another_format_moves_the_limits() -> None:
    """FP8 underflows where FP16 does not."""
    wide = as_json("replay", "synthetic:stationary", "-p", "torch")
    narrow = as_json("replay", "synthetic:stationary", "-p", "torch", "-f", "fp8_e5m2")
    assert wide["oracle"]["weight_underflow"] < narrow["oracle"]["weight_underflow"]


@with_click
def test_tune_gives_numbers_and_sentences() -> None:
    """The same findings as JSON and in words."""
    arguments = ("synthetic:drift_down:steps=2000", "-p", "torch:init_scale=2**18",
                 "-t", "growth_interval=50,2000")  # fmt: skip
    said = as_json("tune", *arguments)
    assert said["policies"][0]["settings"] == {"growth_interval": 50}
    assert said["policies"][0]["sureness"] == "sure"
    assert said["static"]["scale"] == 2.0 ** said["static"]["exponent"]
    text = " ".join(run("tune", *arguments).stdout.split())
    assert f"Best static scale: 2^{said['static']['exponent']}" in text
    assert "torch: best with growth_interval=50" in text


@with_click
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["replay", "nowhere.json"], 1, "There is no trace 'nowhere.json'."),
        (["replay", "synthetic:wobble"], 1, "There is no synthetic trace 'wobble'."),
        (["replay", "synthetic:noise", "-p", "torhc"], 1, "Did you mean 'torch'?"),
        (
            ["replay", "synthetic:noise", "-p", "torch:wings=2"],
            1,
            "It takes: init_scale",
        ),
        (["replay", "synthetic:noise", "-p", "torch:init_scale=-1"], 1, "got -1."),
        (["replay", "synthetic:noise", "-p", "torch:init_scale=big"], 1, "got 'big'."),
        (["tune", "synthetic:noise", "-t", "wings=1"], 1, "no parameter `wings`"),
        (["replay"], 2, "Missing argument 'FILE'"),
        (["replay", "synthetic:noise", "-p", "torch:init_scale"], 2, "not key=value"),
        (["replay", "synthetic:noise", "-p", "static:init_scale=2^9999"], 2, "float"),
        (["replay", "synthetic:noise", "-p", "torch:a=1,a=2"], 2, "is given twice"),
        ([], 2, "Usage: buoy [OPTIONS] COMMAND"),
        (["replay", "synthetic:noise:steps=many"], 2, "steps and seed"),
        (["replay", "synthetic:noise", "-f", "fp12"], 2, "fp12"),
        (["tune", "synthetic:noise", "-t", "growth_interval"], 2, "not key=value"),
        (["tune", "synthetic:noise", "--max-skipped", "7"], 2, "--max-skipped"),
        (["fly"], 2, "No such command 'fly'"),
    ],
)
def test_errors_are_one_paragraph_with_the_right_code(
    arguments: list[str], code: int, said: str
) -> None:
    """1 for what was given, 2 for how it was given; on stderr, without a traceback."""
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert max(map(len, done.stderr.splitlines())) <= 80


OWN = """
from dataclasses import dataclass
import buoy

@dataclass(frozen=True)
class Mine(buoy.Static):
    pass

class Broken:
    def __init__(self):
        raise KeyError("x")
"""


@with_click
@pytest.mark.parametrize("where", ["mine.py", "mine"])
def test_policies_of_ones_own_need_no_package(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file or a module, with parameters; in every command that takes policies."""
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    spec = f"{where}:Mine:init_scale=2**9"
    done = run("replay", "synthetic:noise:steps=50", "-p", spec, "--json")
    row = json.loads(done.stdout)["policies"][0]
    assert (row["name"], row["final_scale"]) == (spec, 512.0)
    done = run("tune", "synthetic:noise:steps=50", "-p", spec, "--json")
    assert json.loads(done.stdout)["policies"][0]["name"] == "Mine"


@with_click
@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("mine.py:Nope", "has no class 'Nope'. It has: Mine, Broken."),
        ("mine.py:Broken", "cannot be created: KeyError: 'x'"),
        ("nowhere.py:Mine", "FileNotFoundError"),
        ("nowhere:Mine", "ModuleNotFoundError"),
        ("mine.py:dataclass", "must be a policy"),
        ("torch:growth_interval=inf", "`growth_interval` must be a whole number"),
        ("torch:growth_interval=nan", "`growth_interval` must be"),
        ("backoff:init_scale=none", "`init_scale` must be"),
    ],
)
def test_policies_that_cannot_be_made_name_field_and_value(
    spec: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of ours in one paragraph, never a traceback."""
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    done = run("replay", "synthetic:noise:steps=50", "-p", spec)
    assert done.returncode == 1
    assert said in " ".join(done.stderr.split())


@with_click
@pytest.mark.parametrize("command", ["replay", "report", "tune", "watch"])
def test_a_name_that_no_file_can_have_is_refused(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A NUL cannot come from a shell, but from a program that calls us."""
    from buoy.cli import main

    monkeypatch.setattr("sys.argv", ["buoy", command, "a\0b"])
    assert main() == 1
    assert "a\\x00b" in capsys.readouterr().err


@with_click
def test_columns_are_called_as_the_fields_are() -> None:
    """What the table says is what `Replayed` says."""
    done = run("replay", "synthetic:noise:steps=50", "-p", "torch")
    lines = done.stdout.splitlines()
    tops, bottoms = lines[2:4]
    fields = "weight underflow activation underflow mean scale final scale too low"
    words = fields.split()
    for top, bottom in zip(words[::2], words[1::2], strict=True):
        assert hasattr(Replayed, f"{top}_{bottom}")
        assert top in tops
        assert bottom in bottoms


@with_click
@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_tables_survive_pipes_of_any_encoding(encoding: str) -> None:
    """No character that the pipe cannot carry."""
    done = run("replay", "synthetic:noise:steps=50", PYTHONIOENCODING=encoding)
    assert done.returncode == 0
    assert "oracle" in done.stdout


@with_click
def test_tune_says_if_no_scale_is_safe_and_if_there_is_nothing_to_try(
    tmp_path: Path,
) -> None:
    """In sentences, not by leaving them out."""
    path = tmp_path / "run.json"
    buoy.trace.write(Trace(amax_log2=(148.0, 1.0) * 50), path)
    said = " ".join(run("tune", str(path), "-p", "none").stdout.split())
    assert "Every scale skips more than" in said
    assert "none: no setting to try; name some with --try." in said
