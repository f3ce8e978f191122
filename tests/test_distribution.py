"""What is published: one name, one version, extras that exist."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import buoy

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def extras_named_in(text: str) -> set[str]:
    """Collect the extras of commands that install this distribution."""
    named = re.findall(r"\b(?:buoy-amp|\.)\\*\[([\w, {}]+)\]'", text)
    named += re.findall(r'"buoy-amp\\*\[([\w, {}]+)\]"', text)
    return {extra.strip() for group in named for extra in group.split(",")}


@pytest.mark.parametrize("path", [*SOURCES, *PAGES], ids=lambda path: path.name)
def test_messages_and_pages_name_extras_that_exist(path):
    """A command that a message recommends must work."""
    known = set(PROJECT["project"]["optional-dependencies"]) | {"{backend}"}

    assert set() == extras_named_in(path.read_text()) - known


def test_extras_are_found():
    """The test above can fail."""
    text = "`pip install 'buoy-amp[torch,gone]'`" + 'pip install "buoy-amp[cli]"'

    assert {"torch", "gone", "cli"} == extras_named_in(text)


@pytest.mark.parametrize("path", [*SOURCES, *PAGES], ids=lambda path: path.name)
def test_nothing_tells_users_to_install_another_distribution(path):
    """`buoy` on the index is another project."""
    assert not re.search(r"pip install (-U )?['\"]?buoy(?!-amp)\b", path.read_text())


def test_the_version_has_one_source():
    """The package, the command and the metadata read the same line."""
    told = subprocess.run(
        [sys.executable, "-m", "buoy", "--version"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    assert "version" in PROJECT["project"]["dynamic"]
    assert "src/buoy/_version.py" == PROJECT["tool"]["hatch"]["version"]["path"]
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", buoy.__version__)
    assert f"buoy, version {buoy.__version__}\n" == told
