"""The bounds of the architecture: how large, how deep, and who may know whom.

Each is a function over a tree of sources, so that each has a test that it can fail.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import buoy

SOURCE = Path(buoy.__file__).parent
CENTRE = SOURCE / "torch"
NOT_COUNTED = {"apex.py", "apex"}

MOST_CODE_LINES = 5000
MOST_FILES = 32
MOST_LINES_IN_A_FILE = 400
MOST_CLASSES = 4  # GradScaler, TorchContract, torch's own, object
MOST_ATTRIBUTES = 16  # beyond torch's

_LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


# --- how large


def code_lines(text: str) -> int:
    """Count the lines that hold code: no blanks, no comments, no docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            lines -= set(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return len(lines)


def counted_files(centre: Path) -> list[Path]:
    """Find the files of a front end that count, those of its features included."""
    return sorted(
        path
        for path in centre.rglob("*.py")
        if not NOT_COUNTED & set(path.relative_to(centre).parts)
    )


def long_files(source: Path) -> dict[str, int]:
    """Find the files with too many lines, of any kind."""
    sizes = {
        str(path.relative_to(source)): len(path.read_text().splitlines())
        for path in source.rglob("*.py")
    }
    return {name: size for name, size in sizes.items() if size > MOST_LINES_IN_A_FILE}


def test_the_torch_front_end_is_small():
    """Code that is not there has no bugs and need not be read."""
    files = counted_files(CENTRE)

    assert len(files) <= MOST_FILES
    assert sum(code_lines(path.read_text()) for path in files) <= MOST_CODE_LINES


def test_no_file_is_long():
    """One purpose each."""
    assert {} == long_files(SOURCE)


def test_code_is_told_from_words():
    """Blanks, comments and docstrings are free; a string that is a value is not."""
    text = '"""Doc.\n\nMore.\n"""\n\n# why\nx = """a\nb"""\n\n\ndef f():\n    "Doc."\n'
    text += "    return (\n        1  # one\n    )\n"

    assert 6 == code_lines(text)


def test_a_long_file_is_found(tmp_path):
    """Blanks and comments count here: they are read, too."""
    (tmp_path / "long.py").write_text("\n" * 401)
    (tmp_path / "short.py").write_text("\n" * 400)

    assert {"long.py": 401} == long_files(tmp_path)


def test_apex_is_not_counted_and_features_are(tmp_path):
    """The bound is one for the centre and its features."""
    for name in ("scaler.py", "apex/amp.py", "features/groups.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    names = [str(path.relative_to(tmp_path)) for path in counted_files(tmp_path)]
    assert ["features/groups.py", "scaler.py"] == names


# --- how deep


def own_attributes(ours: object, theirs: object) -> set[str]:
    """Name what an instance holds beyond another."""
    return set(vars(ours)) - set(vars(theirs))


def test_the_scaler_is_no_tower_of_classes():
    """A class is no namespace."""
    torch_front = pytest.importorskip("buoy.torch", exc_type=ImportError)

    assert len(torch_front.GradScaler.__mro__) <= MOST_CLASSES


def test_the_scaler_has_few_attributes():
    """What belongs together is one object, with a name."""
    torch = pytest.importorskip("torch")
    ours = pytest.importorskip("buoy.torch").GradScaler("cpu")

    found = own_attributes(ours, torch.amp.GradScaler("cpu"))
    assert len(found) <= MOST_ATTRIBUTES, sorted(found)


def assigned_in(text: str, *, outside: str) -> set[str]:
    """Name the attributes of `self` that methods other than `outside` assign."""
    found: set[str] = set()
    for method in ast.walk(ast.parse(text)):
        if not isinstance(method, ast.FunctionDef) or method.name == outside:
            continue
        for node in ast.walk(method):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) == "self"
            ):
                found.add(node.attr)
    return found


def test_one_method_makes_the_attributes():
    """`_assemble` makes them all; torch's own may be replaced later."""
    made = set(vars(pytest.importorskip("torch").amp.GradScaler("cpu")))
    for name in ("scaler.py", "contract.py"):
        text = (CENTRE / name).read_text()
        assert set() == assigned_in(text, outside="_assemble") - made, name


def test_an_attribute_made_elsewhere_is_found():
    """In any method, also among several targets."""
    text = "class A:\n    def _assemble(self):\n        self.a = 1\n"
    text += "    def f(self):\n        self.b, x.c = 1, 2\n"

    assert {"b"} == assigned_in(text, outside="_assemble")


def test_attributes_are_counted():
    """Those that both have are not ours."""

    class Two:
        def __init__(self) -> None:
            self.scale, self.policy = 1.0, None

    class One:
        def __init__(self) -> None:
            self.scale = 1.0

    assert {"policy"} == own_attributes(Two(), One())


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


# --- what is passed around


class Parameter(NamedTuple):
    """One parameter of a function."""

    where: str
    name: str
    annotation: str


def parameters(path: Path) -> Iterator[Parameter]:
    """Find the parameters of all functions of a file, those inside others too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, Function):
            args = node.args
            for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs):
                text = ast.unparse(arg.annotation) if arg.annotation else ""
                yield Parameter(f"{path.name}:{node.lineno}", arg.arg, text.strip("'"))


def untyped_records(source: Path) -> list[Parameter]:
    """Find records that travel as dicts of anything."""
    return [
        found
        for path in sorted(source.rglob("*.py"))
        for found in parameters(path)
        if found.name in {"record", "work"} and "dict[str, Any]" in found.annotation
    ]


def whole_scalers(centre: Path) -> list[Parameter]:
    """Find functions of the centre that take the whole scaler; hooks do."""
    return [
        found
        for path in sorted(centre.glob("*.py"))
        if path.name != "hooks.py"
        for found in parameters(path)
        if found.name == "scaler"
        or set(found.annotation.replace("|", " ").split())
        & {"GradScaler", "TorchContract"}
    ]


def uses_of_locals(source: Path) -> list[str]:
    """Find the calls of `locals`."""
    return [
        f"{path.relative_to(source)}:{node.lineno}"
        for path in sorted(source.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Name) and node.id == "locals"
    ]


def test_records_are_typed():
    """A dict of anything can hold anything."""
    assert [] == untyped_records(CENTRE)


def test_no_function_of_the_centre_takes_the_whole_scaler():
    """What a function needs stands in its signature."""
    assert [] == whole_scalers(CENTRE)


def test_nobody_uses_locals():
    """Options are named where they are passed on."""
    assert [] == uses_of_locals(SOURCE)


def test_what_is_passed_around_is_seen(tmp_path):
    """In methods, in functions inside functions, in quotes."""
    text = "class A:\n    def f(self, record: dict[str, Any]): ...\n"
    text += "def g():\n    def h(x: 'GradScaler | None', *, scaler): ...\n"
    text += "    return locals()\n"
    source = tree(tmp_path, torch__a=text, torch__hooks="def f(scaler): ...\n")

    assert ["record"] == [found.name for found in untyped_records(source)]
    assert ["x", "scaler"] == [found.name for found in whole_scalers(source / "torch")]
    assert ["torch/a.py:5"] == uses_of_locals(source)


def test_plain_arguments_are_fine(tmp_path):
    """Dicts under other names, and other types, are not meant."""
    text = "def f(kwargs: dict[str, Any], work: Work, record: Record): ...\n"
    source = tree(tmp_path, torch__a=text)

    assert [] == untyped_records(source) == whole_scalers(source / "torch")
    assert [] == uses_of_locals(source)


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
