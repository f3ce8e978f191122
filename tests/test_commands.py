"""Every command that the documents show exists and parses; the cheap ones are run."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

import buoy
import buoy.trace
from buoy.cli.app import app

ROOT = Path(__file__).parents[1]
SOURCE = str(Path(buoy.__file__).parents[1])
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
PROGRAMS = ("buoy", "make", "pip", "pytest", "python", "torchrun", "uv")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(rf"`((?:{'|'.join(PROGRAMS)}) [^`]+)`")
OWN = {"train.py", "package.train"}  # stand for a script of the reader's

TRAIN = """\
import argparse
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-3)
args = parser.parse_args()
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
for _ in range(3):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = model(torch.randn(4, 8)).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


def commands_in(text):
    """List the commands of a document, and whether each stands in a block."""
    blocks = [body for kind, body in BLOCK.findall(text) if kind in ("", "bash", "sh")]
    lines = [line for body in blocks for line in body.splitlines()]
    shown = [line for line in lines if line.split(" ")[0] in PROGRAMS]
    named = SPAN.findall(BLOCK.sub("", text))
    whole = [(part, True) for line in shown for part in split(line)]
    return whole + [(part, False) for line in named for part in split(line)]


def split(line):
    """Split `a && b  # comment` into the words of its commands."""
    words = shlex.split(line, comments=True)
    parts, start = [], 0
    for place, word in enumerate([*words, "&&"]):
        if word == "&&":
            parts.append([w for w in words[start:place] if w != "..."])
            start = place + 1
    return parts


FOUND = [
    (path.name, " ".join(map(shlex.quote, words)), whole)
    for path in DOCUMENTS
    for words, whole in commands_in(path.read_text())
]
SHOWN = sorted({(command, whole) for _, command, whole in FOUND})


def check_buoy(words, *, whole):
    """Parse as the command line does; a command that is only named may lack a file."""
    context = app.make_context("buoy", list(words))
    name, command, rest = app.resolve_command(context, list(words))
    try:
        return command.make_context(name, rest, parent=context).params
    except click.MissingParameter:
        if whole:
            raise
        return {}


def check_make(words, **_):
    """Find the rule."""
    rules = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [] == [word for word in words if word not in rules]


def check_python(words, **_):
    """Find the script or module, and its options in its text."""
    if words[0] == "-m":
        if words[1] in ("pip", "pytest"):
            return
        words = [words[1].replace(".", "/") + ".py", *words[2:]]
    if words[0] in OWN:
        return
    text = (ROOT / words[0]).read_text()
    options = [word for word in words[1:] if word.startswith("-")]
    assert [] == [option for option in options if f'"{option}"' not in text]


def check_torchrun(words, *, whole):
    """Check what it starts."""
    if not words:
        return
    if "buoy" in words:
        check_buoy(words[words.index("buoy") + 1 :], whole=whole)
    else:
        check_python([word for word in words if word.endswith(".py")][:1])


def check_uv(words, *, whole):
    """Check what it runs; `sync` makes the environment of the dev group."""
    if words[0] == "sync":
        groups = tomllib.loads((ROOT / "pyproject.toml").read_text())
        assert "dev" in groups["dependency-groups"]
        return
    assert "run" == words[0]
    CHECKS[words[1]](words[2:], whole=whole)


def check_pip(words, **_):
    """Find the extras."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"\[([\w,-]+)\]", " ".join(words))
    for extra in ",".join(named).split(",") if named else []:
        assert extra in extras["optional-dependencies"]


CHECKS = {
    "buoy": check_buoy,
    "make": check_make,
    "pip": check_pip,
    "pytest": lambda words, **_: None,
    "python": check_python,
    "torchrun": check_torchrun,
    "uv": check_uv,
}


@pytest.mark.parametrize(("command", "whole"), SHOWN, ids=str)
def test_commands_of_the_documents_exist_and_parse(command, whole):
    """Names, options, scripts, rules and extras are those that there are."""
    program, *words = shlex.split(command)
    CHECKS[program](words, whole=whole)


@pytest.mark.parametrize(
    "command",
    [
        "buoy run --no-such-option train.py",
        "buoy reprot run.buoy",
        "buoy report",
        "make coffee",
        "python benchmarks/nowhere.py",
        "python benchmarks/torch_step.py --no-such-option",
        "torchrun --no-python buoy doctor --no-such-option train.py",
        "pip install '.[nothing]'",
        "uv synchronise",
        "uv run python benchmarks/nowhere.py",
    ],
)
def test_a_wrong_command_would_be_found(command):
    """The checks can fail."""
    program, *words = shlex.split(command)
    with pytest.raises((AssertionError, OSError, click.ClickException)):
        CHECKS[program](words, whole=True)


def test_the_documents_show_commands():
    """All forms are found: in blocks and in sentences, with comments and dots."""
    shown = {command for command, _ in SHOWN}

    assert {
        "buoy run --report train.py",
        "buoy report run.buoy",
        "make demo",
        "python benchmarks/disagreements.py",
        "python tools/pictures/demo.py buoy-demo.html",
    } <= shown


# -- run as they stand ----------------------------------------------------------------

DEAR = {"demo"}  # trains for minutes: `tests/demo` runs it, shorter
ALSO = {"watch": ["--once"]}  # or it would wait for the run to go on


def is_complete(command):
    """Say whether it names all that it needs, and trains for no minutes."""
    program, name, *rest = shlex.split(command)
    if program != "buoy" or name in DEAR:
        return False
    try:
        check_buoy([name, *rest], whole=True)
    except click.MissingParameter:
        return False
    return True


RUN = sorted({command for command, _ in SHOWN if is_complete(command)})


PRINTED = re.compile(
    r"^`(buoy [^`]+)`[^\n]*:\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
SHOWS = {
    command: PRINTED.findall(path.read_text())[0][1:]
    for path in DOCUMENTS
    for command, _ in PRINTED.findall(path.read_text())
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Write what the documents' commands read."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "train.py").write_text(TRAIN)
    invented = buoy.trace.synthetic("drift_down", steps=500, seed=0)
    buoy.trace.write(invented, folder / "run.json")
    (folder / "my_policies.py").write_text("from buoy import Backoff as Mine\n")
    for name in ("run", "a", "b", "rl"):
        with buoy.trace.Recorder(folder / f"{name}.buoy") as recorder:
            for step in range(20):
                recorder.step(
                    scale=2.0**16, applied=step != 3, amax=0.5, loss=1.0, norm=1.0
                )
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("command", RUN)
def test_cheap_commands_of_the_documents_run(command, files):
    """Typed literally, in a folder that has the files that they name."""
    if " run " in command or " doctor " in command:
        pytest.importorskip("torch")
    if " report " in command or "--report" in command:
        pytest.importorskip("bokeh")
    words = [word for word in shlex.split(command)[1:] if word != "--open"]
    done = subprocess.run(
        [sys.executable, "-m", "buoy", *words, *ALSO.get(words[0], [])],
        capture_output=True,
        text=True,
        check=False,
        cwd=files,
        timeout=300,
        env={**os.environ, "PYTHONPATH": SOURCE},
    )

    assert 0 == done.returncode, done.stderr
    for shown in SHOWS.get(command, ()):
        assert " ".join(shown.split()) in " ".join(done.stdout.split())


def test_the_output_of_commands_is_found():
    """A `text` block after a command's sentence is what the command prints."""
    assert "buoy tune synthetic:drift_down" in RUN
    assert "Best static scale" in SHOWS["buoy tune synthetic:drift_down"][0]


@pytest.mark.slow
def test_the_table_of_disagreements_is_printed():
    """The benchmark that the README names, which is a cheap one."""
    done = subprocess.run(
        [sys.executable, "benchmarks/disagreements.py"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": SOURCE},
    )

    assert 0 == done.returncode, done.stderr
    assert "torch" in done.stdout
