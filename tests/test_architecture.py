"""Directions in the code: who may know whom; and the map of it in CONTRIBUTING.md.

Each check is a function over a tree of sources, so that each has a test that it can
fail.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import buoy

SOURCE = Path(buoy.__file__).parent
CENTRE = SOURCE / "torch"

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


# --- who knows whom


class Import(NamedTuple):
    """One module named by an import statement."""

    module: str
    lazy: bool  # inside a function


def imports(path: Path, source: Path) -> Iterator[Import]:
    """Find what a file imports from Buoy; of `from a import b` the module `a.b`."""

    def walk(node: ast.AST, *, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, lazy)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = ["buoy", *path.relative_to(source).parent.parts]
                package = package[: len(package) - node.level + 1]
                base = ".".join([*package, base] if base else package)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield Import(inner if file_of(inner, source) else base, lazy)
        inside = lazy or isinstance(node, Function)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, lazy=inside)

    for found in walk(ast.parse(path.read_text()), lazy=False):
        if found.module.partition(".")[0] == "buoy":
            yield found


def file_of(module: str, source: Path) -> Path | None:
    """Find the file of a module of Buoy."""
    place = source.joinpath(*module.split(".")[1:])
    for path in (place.with_suffix(".py"), place / "__init__.py"):
        if path.exists():
            return path
    return None


def through_the_wall(centre: Path) -> set[str]:
    """Name the files of the centre that import a feature when they are imported.

    `__init__` does so to export public names, and counts for nothing.
    """
    return {
        path.name
        for path in centre.glob("*.py")
        if path.name != "__init__.py"
        for found in imports(path, centre.parent)
        if not found.lazy and found.module.startswith("buoy.torch.features")
    }


def cycles(source: Path) -> list[list[str]]:
    """Find the modules that import each other, for type checkers alone included.

    Imports inside functions are left out: they are how a wall is passed on purpose.
    """
    files = sorted(source.rglob("*.py"))
    graph = {
        path: {
            target
            for found in imports(path, source)
            if not found.lazy
            and (target := file_of(found.module, source)) is not None
            and target != path
        }
        for path in files
    }
    reached = {path: _reachable(path, graph) for path in files}
    groups = {
        frozenset(other for other in reached[path] if path in reached[other])
        for path in files
        if path in reached[path]
    }
    return sorted(sorted(str(p.relative_to(source)) for p in one) for one in groups)


def _reachable(start: Path, graph: dict[Path, set[Path]]) -> set[Path]:
    found: set[Path] = set()
    waiting = [start]
    while waiting:
        new = graph.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


def test_the_centre_knows_no_feature():
    """But for one file, the table of those that are on by default."""
    assert len(through_the_wall(CENTRE)) <= 1


def test_no_modules_import_each_other():
    """Whoever reads one must be able to stop there."""
    assert [] == cycles(SOURCE)


def tree(root: Path, **files: str) -> Path:
    """Write sources; `torch__a` stands for torch/a.py."""
    for name, text in files.items():
        path = root.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_hole_in_the_wall_is_seen(tmp_path):
    """However the import is written, unless a function makes it."""
    source = tree(
        tmp_path,
        torch__features__groups="",
        torch__one="from buoy.torch.features import groups\n",
        torch__two="import buoy.torch.features.groups\n",
        torch__three="if TYPE_CHECKING:\n    from .features.groups import Group\n",
        torch__lazy="def f():\n    from buoy.torch.features import groups\n",
        torch__none="from buoy.torch import one\n",
    )

    found = through_the_wall(source / "torch")
    assert {"one.py", "two.py", "three.py"} == found


def test_a_cycle_is_seen(tmp_path):
    """Over three files, one of which imports for type checkers alone."""
    source = tree(
        tmp_path,
        torch__a="from buoy.torch import b\n",
        torch__b="from buoy.torch.c import C\n",
        torch__c="if TYPE_CHECKING:\n    from .a import A\n",
        torch__d="from buoy.torch import a\n",
        torch__e="def f():\n    from buoy.torch import g\n",
        torch__g="from buoy.torch import e\n",
    )

    assert [["torch/a.py", "torch/b.py", "torch/c.py"]] == cycles(source)


# --- the map of the code


def unknown_names(text: str, source: Path) -> set[str]:
    """Find names in backticks that are neither files below a source nor words in it."""
    files = [path.relative_to(source) for path in source.rglob("*.py")]
    words = set(re.findall(r"\w+", "\n".join((source / x).read_text() for x in files)))
    paths = {str(path) for path in files}
    paths |= {f"{path.parent}/" for path in files} | {path.name for path in files}
    quoted = set(re.findall(r"`([\w./]+)`", text))
    return {
        name
        for name in quoted - paths
        if not any(path.endswith(f"/{name}") for path in paths)
        and not set(re.findall(r"\w+", name)) <= words
    }


def test_the_map_names_what_exists():
    """A newcomer looks for these names."""
    text = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
    _, _, there = text.partition("## A map of the code")
    there, _, _ = there.partition("## How it is written")

    outside = {"make", "docs/guides/skipped-steps.md", "docs/guides/jax.md"}
    outside |= {"docs/wrong/index.md"}
    assert unknown_names(there, SOURCE) <= outside


def test_a_name_that_is_gone_is_found(tmp_path):
    """Of a dotted name every part counts; a path is one of a file or a folder."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "survey.py").write_text("class Surveyor: ...\n")
    text = (
        "`Surveyor`, `Surveyor.gone`, `torch/survey.py`, `survey.py`, `torch/`, `Old`"
    )

    assert {"Surveyor.gone", "Old"} == unknown_names(text, tmp_path)
