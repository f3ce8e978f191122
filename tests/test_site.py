"""The pages of the site: tables, links, headings, spelling, the reference."""

import functools
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.disagreements import rows
from buoy.cli.app import app

ROOT = Path(__file__).parents[1]
PAGES = [
    path
    for path in sorted((ROOT / "docs").rglob("*.md"))
    if not path.read_text().startswith("```{include}")
]
DOCUMENTS = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
PROSE = [*DOCUMENTS, ROOT / "CHANGELOG.md", ROOT / "CODE_OF_CONDUCT.md"]
FENCE = re.compile(r"^(?P<mark>```+|:::+).*?^(?P=mark)$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.*)$", re.MULTILINE)


def prose(text):
    """Return the text without its fenced blocks."""
    return FENCE.sub("", text)


def cells(row):
    """Split a row of a table; `\\|` and a `|` in code are part of a cell."""
    bare = re.sub(r"`[^`]*`", lambda code: code[0].replace("|", " "), row)
    return len(re.split(r"(?<!\\)\|", bare.strip().strip("|")))


def broken_tables(text):
    """List the rows with another number of cells than their table's head."""
    broken, width = [], 0
    lines = prose(text).splitlines()
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        if not line.lstrip().startswith("|"):
            width = 0
            continue
        if not width:
            width = cells(line)
            if not re.fullmatch(r"\s*\|?[\s:|-]+\|?\s*", after):
                broken.append(line)
        elif cells(line) != width:
            broken.append(line)
    return broken


def slug(heading):
    """Return the anchor of a heading, as GitHub and MyST make it."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")


def headings(text):
    """List the headings outside of code."""
    return HEADING.findall(prose(text))


def dead_links(path):
    """List the links to files and headings that do not exist."""
    dead = []
    for target in LINK.findall(prose(path.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        found = file.exists()
        if found and anchor:
            found = anchor in map(slug, headings(file.read_text()))
        if not found:
            dead.append(target)
    return dead


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_pages_are_well_formed(path):
    """Tables have whole rows, links lead somewhere, headings are told apart."""
    text = path.read_text()
    names = [slug(heading) for heading in headings(text)]

    assert [] == broken_tables(text)
    assert [] == dead_links(path)
    assert [] == sorted({name for name in names if names.count(name) > 1})
    assert 1 == len(re.findall(r"^# ", prose(text), re.MULTILINE))
    assert 0 == text.count("\n```") % 2


def test_titles_of_pages_are_told_apart():
    """No two pages have the same title: the menu and the search show titles."""
    titles = [headings(path.read_text())[0] for path in PAGES]

    assert [] == sorted({title for title in titles if titles.count(title) > 1})


def test_broken_pages_would_be_found(tmp_path):
    """The checks can fail."""
    page = tmp_path / "page.md"
    page.write_text("# A\n\n[b](c.md) [d](#nowhere) [e](#a)\n")

    assert ["c.md", "#nowhere"] == dead_links(page)
    assert ["| 1 | 2 | 3 |"] == broken_tables("| a | b |\n|---|--:|\n| 1 | 2 | 3 |\n")
    assert ["| a | b |"] == broken_tables("| a | b |\n| 1 | 2 |\n")[:1]
    assert [] == broken_tables("| a | b |\n|---|---|\n| `x | y` | \\| |\n")


def test_words_are_words():
    """The spelling of the documents, the sources and the messages in them."""
    pytest.importorskip("codespell_lib")
    texts = [*map(str, DOCUMENTS), "src", "examples"]
    done = subprocess.run(
        [sys.executable, "-m", "codespell_lib", *texts],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )

    assert "" == done.stdout + done.stderr


LATIN = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)?")
NOT_PROSE = re.compile(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->|https?://\S+", re.DOTALL)


def words(text):
    """Collect the words of a page; names such as GradScaler or FP16 are none."""
    found = LATIN.findall(NOT_PROSE.sub(" ", prose(text)))
    plain = {word.removesuffix("'s") for word in found if len(word) > 2}
    return {word.lower() for word in plain if word[1:].islower()}


KNOWN = set((ROOT / "tests" / "words.txt").read_text().split())


@functools.cache
def dictionary():
    """Load the dictionary, once."""
    return pytest.importorskip("spellchecker").SpellChecker()


def strange(found):
    """List what is in no dictionary, and not among the field's words either."""
    return sorted(dictionary().unknown(found) - KNOWN)


@pytest.mark.parametrize("path", PROSE, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_word_is_in_a_dictionary(path):
    """A new word of the field goes into `tests/words.txt`."""
    assert [] == strange(words(path.read_text()))


def test_words_that_are_none_would_be_found():
    """Also those that no list of misspellings has; code and names are left out."""
    assert ["flurbish", "thr"] == strange(words("Thr scale is flurbish: `qwrt` FP16."))


def test_the_list_of_words_has_no_leftovers():
    """Each is used, and in no dictionary."""
    used = set().union(*(words(path.read_text()) for path in PROSE))

    assert sorted(dictionary().unknown(KNOWN)) == sorted(KNOWN & used) == sorted(KNOWN)


def test_the_table_of_presets_is_what_the_command_prints():
    """Every row, in the same order."""
    text = (ROOT / "docs" / "policies" / "presets.md").read_text()
    shown = [line for line in text.splitlines() if line.startswith("| `")]

    assert rows() == shown


@pytest.mark.slow
def test_the_comparison_shows_what_the_scalers_do():
    """Every row that `benchmarks/peers.py` prints, as the scalers do it now."""
    for name in ("torch", "flax", "jmp"):
        pytest.importorskip(name)
    peers = importlib.import_module("benchmarks.peers")
    text = (ROOT / "docs" / "why" / "comparison.md").read_text()

    assert [] == [row for row in peers.rows() if row not in text]
    assert {"flax": "2^-126", "jmp": "2^0", "buoy": "2^-24"} == peers.minima()


# -- the reference --------------------------------------------------------------------

REFERENCE = ROOT / "docs" / "reference"
AUTOMODULE = re.compile(r"automodule:: (buoy[\w.]*)\n((?:   :.*\n)*)")


PROGRAMS = {"cli", "demo"}  # commands, no modules to import


def public_modules():
    """List what users import: the packages, and each integration."""
    source = ROOT / "src" / "buoy"
    paths = [*source.iterdir(), *(source / "integrations").iterdir()]
    names = {path.relative_to(source).with_suffix("").parts for path in paths}
    private = PROGRAMS | {"integrations", "py", "data", "common"}
    return {"buoy"} | {
        ".".join(("buoy", *parts))
        for parts in names
        if not parts[-1].startswith("_") and parts[-1] not in private
    }


def documented():
    """Map the modules that the reference shows to the names that it leaves out."""
    found = {}
    for page in REFERENCE.glob("*.md"):
        for name, options in AUTOMODULE.findall(page.read_text()):
            left = re.search(r":exclude-members: (.*)", options)
            found[name] = set(left[1].split(", ")) if left else set()
    return found


def load(name):
    """Import a module of ours, or return None if its framework is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def test_every_public_module_is_in_the_reference():
    """A module, or one inside it, is on a page, and the index lists the page."""
    held = documented()
    missing = [
        name
        for name in public_modules()
        if not any(shown == name or shown.startswith(f"{name}.") for shown in held)
    ]

    assert [] == missing
    index = (REFERENCE / "index.md").read_text()
    pages = {page.stem for page in REFERENCE.glob("*.md")} - {"index"}
    assert pages == {line for line in index.splitlines() if line in pages}


def test_names_that_a_page_leaves_out_are_on_another():
    """The same object, under a name of another module."""
    pytest.importorskip("torch")
    modules = {name: load(name) for name in documented()}
    shown = [
        getattr(module, member)
        for name, module in modules.items()
        if module is not None
        for member in set(module.__all__) - documented()[name]
    ]
    for name, module in modules.items():
        if module is not None:
            left_out = [getattr(module, member) for member in documented()[name]]
            assert [] == [one for one in left_out if one not in shown], name


def test_every_command_and_option_is_in_the_reference():
    """By name; what each does, `buoy COMMAND --help` says as well."""
    page = (REFERENCE / "commands.md").read_text()
    for name, command in app.commands.items():
        part = page.split(f"\n## `buoy {name}`\n")[1].split("\n## ")[0]
        options = {one for p in command.params for one in p.opts if one[0] == "-"}
        assert options - {"--json"} == set(re.findall(r"`(--?\w[\w-]*)`", part)), name


MISREAD = re.compile(
    r">(?:Type|Return type)<span|Alias for field number|docs/[\w/-]+\.md|<blockquote"
)


def misread(page):
    """List what Sphinx took for something else, or left as it was.

    A colon in the first line of a property becomes a type, code without `::` running
    text; a path of a page is no link.
    """
    return MISREAD.findall(page)


def test_a_misread_docstring_would_be_found():
    """The check can fail."""
    assert [] != misread('<dt class="field-odd">Type<span class="colon">:</span></dt>')
    assert [] != misread("<p>see docs/guides/retry.md</p>")
    assert [] == misread("<p>The type of a step</p>")


@pytest.mark.long
def test_the_site_builds_without_warnings(tmp_path):
    """As `make docs` does, and every public name is in its inventory."""
    pytest.importorskip("furo")
    inventory = importlib.import_module("sphinx.util.inventory")
    command = ["-m", "sphinx", "--fail-on-warning", "--keep-going", "-q", "-b", "html"]
    done = subprocess.run(
        [sys.executable, *command, "docs", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert 0 == done.returncode, done.stderr

    content = (tmp_path / "objects.inv").read_bytes()
    held = inventory.InventoryFile.loads(content, uri="")
    names = {name for kind in held.data.values() for name in kind}
    for name, left_out in documented().items():
        module = load(name)
        members = set(module.__all__) - left_out if module is not None else ()
        assert [] == [one for one in members if f"{name}.{one}" not in names]
    for page in (tmp_path / "reference").glob("*.html"):
        assert [] == misread(page.read_text()), page.name
