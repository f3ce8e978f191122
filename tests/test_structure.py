"""The walls between the packages: who imports whom, what is public, what is frozen."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import buoy

SOURCE = Path(buoy.__file__).parent
FRAMEWORKS = {"torch", "jax", "jaxlib", "keras", "numpy", "optax", "flax", "tensorflow"}

# Imports point one way: a package may import those to its left, and itself.
ORDER = ["_core", "_backends", "trace", "front", "diagnose", "integrations", "report"]
ORDER += ["demo", "cli"]
FRONTS = {"torch", "jax", "keras", "tensorflow", "emulate"}


def package_of(path: Path) -> str | None:
    """Name the package that a file belongs to; None for the files at the top."""
    parts = path.relative_to(SOURCE).parts
    if len(parts) == 1:
        return None
    return "front" if parts[0] in FRONTS else parts[0]


def imports_of(path: Path) -> set[str]:
    """Name every module that a file imports, wherever the statement stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
    return found


def wrong_arrows(path: Path) -> list[str]:
    """Name the imports that point the wrong way."""
    package, wrong = package_of(path), []
    if package not in ORDER:
        return []
    for module in sorted(imports_of(path)):
        parts = module.split(".")
        if parts[0] != "buoy" or len(parts) == 1:
            continue
        target = "front" if parts[1] in FRONTS else parts[1]
        if target in ORDER and ORDER.index(target) > ORDER.index(package):
            wrong.append(f"{path.relative_to(SOURCE)} imports {module}")
    return wrong


FILES = sorted(SOURCE.rglob("*.py"))


def test_imports_point_one_way():
    """No package imports one further out."""
    assert [] == [arrow for path in FILES for arrow in wrong_arrows(path)]


def test_the_core_imports_the_standard_library_alone():
    """Nothing in the core needs anything installed."""
    allowed = set(sys.stdlib_module_names) | {"buoy"}
    foreign = {
        (path.name, module)
        for path in (SOURCE / "_core").rglob("*.py")
        for module in imports_of(path)
        if module.split(".")[0] not in allowed
    }

    assert set() == foreign


def test_wrong_arrows_are_seen(tmp_path, monkeypatch):
    """The test of the arrows can fail."""
    monkeypatch.setitem(globals(), "SOURCE", tmp_path)
    (tmp_path / "_core").mkdir()
    bad = tmp_path / "_core" / "bad.py"
    bad.write_text("def f():\n    from buoy.torch import GradScaler\n")

    assert wrong_arrows(bad)


def loaded_by(code: str) -> set[str]:
    """Run code in a fresh interpreter; name the frameworks that it loaded."""
    code += "\nimport sys; print(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return {name.split(".")[0] for name in run.stdout.split()} & FRAMEWORKS


def test_importing_buoy_imports_no_framework():
    """`import buoy` and running a policy load none of them."""
    code = (
        "import buoy\n"
        "p = buoy.policy('headroom'); s = p.init()\n"
        "p.update(p.foresee(s, 1.0), buoy.Seen(finite=True, amax_log2=1.0))\n"
    )

    assert set() == loaded_by(code)


def test_a_framework_would_be_seen():
    """The test of imports can fail."""
    pytest.importorskip("numpy")

    assert {"numpy"} == loaded_by("import buoy, numpy")


def test_public_names_are_frozen():
    """The public surface changes only together with a line in CHANGELOG.md."""
    assert PUBLIC == buoy.__all__
    for name in buoy.__all__:
        assert getattr(buoy, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'scale'"):
        buoy.scale  # noqa: B018


PUBLIC = """
FORMATS Backoff Bounds BuoyError CallOrderError Format Headroom Histogram Imported
LogNormal LossAhead MissingBackendError NoScaling Ops Policy PolicyError Replayed
Row ScaleCollapsedError Seen StateVersionError Static Trace TraceError Tuned
UnknownPolicyError Verdict decode encode import_state lift number_format ops_of
oracle policies policy register replay trace tune
""".split()


def test_sources_are_plain_ascii():
    """No file needs an encoding."""
    for path in FILES:
        assert path.read_text(encoding="utf-8").isascii(), path


def test_no_assert_in_the_sources():
    """Users' mistakes are errors with words, not assertions."""
    found = [
        path.name
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assert)
    ]

    assert [] == found
