"""The documents tell the truth: every Python block in them runs as it stands.

An `output` block after a Python block holds what that prints; `...` stands for text
that is left out.  Both sides of every `diff` run, after what `tests/diffs.py` sets up.
"""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.diffs import ELSEWHERE, SETUP
from tests.typed import Typist

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(
    r"^```python\n(.*?)^```$(?:\n+(?:[^`\n]+\n+)?```output\n(.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
IMPORTED = re.compile(r"^(?:import|from) (\w+)", re.MULTILINE)
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
BLOCKS = {  # the same block on two pages is run once
    shown: f"{path.relative_to(ROOT).with_suffix('')}-{index}"
    for path in PAGES
    for index, shown in enumerate(BLOCK.findall(path.read_text()))
}


@pytest.fixture(scope="session")
def typed(tmp_path_factory):
    """Run code in a fresh interpreter, or in a fork of one that has imported torch."""
    typist = Typist(tmp_path_factory.mktemp("typed")) if find_spec("torch") else None

    def run(code, folder):
        others = {"jax", "keras", "tensorflow"} & set(re.findall(r"\w+", code))
        if typist is not None and "torch" in code and not others:
            return typist.run(code, folder)
        return subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=False,
            cwd=folder,
        )

    yield run
    if typist is not None:
        typist.close()


@pytest.mark.slow
@pytest.mark.parametrize(("block", "output"), BLOCKS, ids=BLOCKS.values())
def test_examples_in_the_documents_run(block, output, typed, tmp_path):
    """Typed literally into a fresh interpreter, an example prints what is shown."""
    for name in IMPORTED.findall(block):
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    done = typed(block, tmp_path)

    assert 0 == done.returncode, done.stderr
    printed = " ".join(f"{done.stdout} {done.stderr}".split())
    for part in output.split("..."):
        assert " ".join(part.split()) in printed


def test_every_output_block_belongs_to_an_example():
    """None is left unchecked because of what stands between the two."""
    for path in PAGES:
        text = path.read_text()
        shown = sum(1 for _, output in BLOCK.findall(text) if output)
        assert text.count("```output") == shown, path


DIFF = re.compile(r"^```diff\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DIFFS = {
    f"{Path(name).with_suffix('')}-diff{index}": (name, index)
    for name, setups in SETUP.items()
    for index, _ in enumerate(setups)
}


def sides(diff):
    """Return the code before and after a change."""
    lines = diff.splitlines()
    return [
        "\n".join(line[1:] for line in lines if not line.startswith(left_out))
        for left_out in "+-"
    ]


def missing(code):
    """List the packages that a piece of code imports and that are not installed."""
    names = IMPORTED.findall(code)
    return [name for name in names if find_spec(name) is None]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "index"), DIFFS.values(), ids=DIFFS)
def test_both_sides_of_a_diff_run(name, index, typed, tmp_path):
    """What a reader has, and what the page makes of it, on a CPU."""
    diff = DIFF.findall((ROOT / name).read_text())[index]
    programs = [
        f"{SETUP[name][index]}\n{side}".replace('"cuda"', '"cpu"')
        for side in sides(diff)
    ]
    runs = [program for program in programs if not missing(program)]
    if not runs:
        pytest.skip(f"not installed: {', '.join(missing(programs[1]))}")
    done = typed("\n".join(f"exec({run!r}, {{}})" for run in runs), tmp_path)

    assert 0 == done.returncode, done.stderr


def test_every_diff_is_run():
    """None is forgotten, and the tests that run some of them exist."""
    shown = {
        str(path.relative_to(ROOT)): DIFF.findall(path.read_text()) for path in PAGES
    }
    counted = {name: len(diffs) for name, diffs in shown.items() if diffs}

    expected = {name: len(setups) for name, setups in SETUP.items()}
    assert expected == {n: c for n, c in counted.items() if n not in ELSEWHERE}
    assert set(ELSEWHERE) <= set(counted)
    assert all((ROOT / test).exists() for test in ELSEWHERE.values())


def test_a_diff_has_two_sides():
    """Lines without a sign are in both."""
    assert ["a\nc", "b\nc"] == sides("-a\n+b\n c\n")


def test_a_fork_is_as_good_as_a_fresh_interpreter(tmp_path):
    """It knows no name, has its own folder, tells how it ends, and pickles its own."""
    pytest.importorskip("torch")
    typist = Typist(tmp_path)
    for code in ("torch", "buoy", "1 / 0", "raise SystemExit(1)"):
        assert 1 == typist.run(code, tmp_path).returncode
    assert "NameError" in typist.run("torch", tmp_path).stderr
    code = """
import atexit, os, pickle, sys
class Mine: ...
pickle.loads(pickle.dumps(Mine()))
atexit.register(print, "at the end", __name__, "buoy" in sys.modules)
print(os.getcwd())
"""
    done = typist.run(code, tmp_path)
    typist.close()

    assert (0, "") == (done.returncode, done.stderr)
    assert [str(tmp_path), "at the end __main__ False"] == done.stdout.splitlines()
