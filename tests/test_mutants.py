"""The mutation tester: what it changes, what it leaves alone, and what it counts."""

import ast

import pytest

from tools import mutants
from tools.mutate import mutants_of


def changes(body: str) -> list[tuple[str, str]]:
    """Mutate a function with this body; give each operator and the new body."""
    text = "def f(a, b):\n" + "".join(f"    {line}\n" for line in body.splitlines())
    return [
        (one.operator, _body(one.mutated))
        for one in mutants_of(text, "src/one.py")
        if one.valid
    ]


def _body(text: str) -> str:
    function = ast.parse(text).body[0]
    return "\n".join(map(ast.unparse, function.body))


@pytest.mark.parametrize(
    ("body", "operator", "expected"),
    [
        ("x = a < b", "comparison", "x = a >= b"),
        ("x = a is not None", "comparison", "x = a is None"),
        ("x = a < b <= c", "comparison", "x = a < b > c"),
        ("x = (a) in (b)", "comparison", "x = a not in b"),
        ("x = (a + b) / c", "arithmetic", "x = (a + b) * c"),
        ("x = (a + b) / c", "arithmetic", "x = (a - b) / c"),
        ("a -= b", "arithmetic", "a += b"),
        ("x = a and b", "boolean", "x = a or b"),
        ("x = not a", "boolean", "x = a"),
        ("x = True", "constant", "x = False"),
        ("x = 3", "constant", "x = 4"),
        ("x = 0.5", "constant", "x = 1.0"),
        ("a.b = c", "dropped statement", "pass"),
        ("a['b'] = c", "dropped statement", "pass"),
        ("a(\n    b\n)", "dropped statement", "pass"),
        ("if a:\n    b", "swapped branches", "if not a:\n    b"),
        ("x = a if b else c", "swapped branches", "x = c if b else a"),
        ("return a", "dropped return value", "return None"),
    ],
)
def test_each_operator(body, operator, expected):
    """One place at a time."""
    assert (operator, expected) in changes(body)


@pytest.mark.parametrize(
    "body",
    [
        "x: Final[3] = a",
        "raise ValueError(a + 1)",
        "x = f'{a + 1:.3f}'",
        "x = 'a' + b",
        "return f'{a}'",
        "x = a",
        "x = a.to(b, non_blocking=True)",
        "x = zip(a, b, strict=True)",
        '"""Say 3 + 4."""',
    ],
)
def test_what_is_no_behaviour_is_left_alone(body):
    """Messages, annotations, docstrings, and what makes no difference."""
    assert [] == changes(body)


def test_only_bodies_of_functions_are_changed():
    """Constants, defaults and decorators are configuration."""
    text = "X = 3\n\n@cache(4)\ndef f(a=5, *, b: int = 6) -> 7: ...\n"
    text += "class A:\n    y = 8\n    def g(self):\n        def h(): return 9\n"

    found = mutants_of(text, "src/one.py")
    assert {"A.g.h"} == {one.function for one in found}
    assert ["return None", "(10)"] == [one.new for one in found]


def test_a_mutant_is_known_by_what_does_not_move():
    """Lines that are added above change no key; two of a kind have two."""
    text = "def f(a):\n    if a:\n        return 1\n    return 1\n"
    keys = [one.key for one in mutants_of(text, "src/one.py")]

    moved = "# More.\n\n\n" + text
    assert keys == [one.key for one in mutants_of(moved, "src/one.py")]
    assert len(keys) == len(set(keys)) == 5
    assert "src/one.py :: f :: constant :: return 1 => return (2)" in keys
    assert "src/one.py :: f :: constant #2 :: return 1 => return (2)" in keys


@pytest.mark.slow
def test_the_sample_is_fixed_by_its_seed():
    """And another seed takes others."""
    every = mutants.all_mutants()

    first, again, other = (
        [one.key for one in mutants.sample(every, seed, 60)] for seed in (1, 1, 2)
    )
    assert 60 == len(set(first))
    assert first == again
    assert first != other


def test_every_source_has_tests_and_every_equivalent_a_reason():
    """The tables are whole."""
    for path in mutants.sources(mutants.SOURCES):
        stages = mutants.stages_for(path.relative_to(mutants.ROOT).as_posix())
        tests = [one for some in stages for one in some if one.startswith("tests")]
        assert tests
        for file, _, name in (test.partition("::") for test in tests):
            assert (mutants.ROOT / file).exists()
            function = name.partition("[")[0]
            assert not name or f"def {function}(" in (mutants.ROOT / file).read_text()
    known = mutants.equivalents(mutants.EQUIVALENT.read_text())
    assert all(known.values())
    assert set(known) <= {one.key for one in mutants.all_mutants()}


@pytest.mark.parametrize(("lived", "enough"), [(1, True), (2, False)])
def test_enough_must_die(lived, enough, capsys):
    """Of twenty, nineteen; what hangs has been noticed."""
    one = mutants_of("def f(a):\n    return a\n", "src/one.py")[0]
    fates = ["survived"] * lived + ["timed out"] + ["killed"] * (19 - lived)
    jobs = [mutants.Job(one, (), fate=fate) for fate in fates]

    assert enough == mutants.report(jobs, 3)
    said = capsys.readouterr().out
    assert lived == said.count("+    return None")
    assert f"{20 - lived} killed (1 by the time limit), {lived} survived, 3 kn" in said


def test_a_list_of_equivalents_is_read():
    """Comments are not."""
    text = "# why\n\na.py :: f :: constant :: x = 1 => x = (2) :: nobody reads x\n"

    expected = {"a.py :: f :: constant :: x = 1 => x = (2)": "nobody reads x"}
    assert expected == mutants.equivalents(text)


@pytest.mark.slow
def test_every_mutant_is_another_program():
    """None is lost to a change that does not compile."""
    text = (mutants.ROOT / "src/buoy/torch/step.py").read_text()
    found = mutants_of(text, "src/buoy/torch/step.py")

    assert [] == [one.key for one in found if not one.valid]
