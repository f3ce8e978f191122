"""Make mutants of Python sources: one small change of behaviour each.

Only function bodies are changed, and in them neither docstrings and annotations nor
what is raised and what is said: a message with another number in it is no bug.
"""

import ast
import difflib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

__all__ = ["Mutant", "mutants_of"]

_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: ">=", ast.GtE: "<", ast.Gt: "<=", ast.LtE: ">", ast.Eq: "!=",
    ast.NotEq: "==", ast.Is: "is not", ast.IsNot: "is", ast.In: "not in",
    ast.NotIn: "in",
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*",
    ast.Mod: "*", ast.Pow: "*", ast.MatMult: "+", ast.BitAnd: "|", ast.BitOr: "&",
    ast.LShift: ">>", ast.RShift: "<<",
}  # fmt: skip
_TEXT = (ast.JoinedStr, ast.Raise, ast.Assert)
# Keywords that change when, not what; `strict` of `zip` is an assertion.
_HINTS = {"non_blocking", "stacklevel", "strict"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    file: str  # relative to the root, with slashes
    function: str  # qualified name
    operator: str
    start: int  # offsets into the text
    end: int
    old: str
    new: str
    text: str  # of the whole file, unchanged
    number: int = 1  # of those that read alike

    @property
    def mutated(self) -> str:
        """The text of the whole file, changed."""
        return self.text[: self.start] + self.new + self.text[self.end :]

    @property
    def valid(self) -> bool:
        """Whether it is a program, and another one."""
        try:
            changed = ast.dump(ast.parse(self.mutated))
        except SyntaxError:
            return False
        return changed != ast.dump(ast.parse(self.text))

    @property
    def key(self) -> str:
        """Describe it by what does not move when other lines do."""
        before = self.text[: self.start].rpartition("\n")[2].lstrip()
        after = self.text[self.end :].partition("\n")[0]
        old = _one_line(before + self.old + after)
        new = _one_line(before + self.new + after)
        operator = self.operator
        if self.number > 1:
            operator += f" #{self.number}"
        return f"{self.file} :: {self.function} :: {operator} :: {old} => {new}"

    @property
    def diff(self) -> str:
        """Show what is changed."""
        lines = difflib.unified_diff(
            self.text.splitlines(),
            self.mutated.splitlines(),
            self.file,
            self.file,
            n=1,
            lineterm="",
        )
        return "\n".join(lines)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def mutants_of(text: str, file: str) -> list[Mutant]:
    """List every mutant of a file, in the order of the text."""
    offsets = [0]
    for line in text.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))
    found = [
        Mutant(file, function, operator, *where, text[slice(*where)], new, text)
        for function, node in _bodies(ast.parse(text), "")
        for operator, where, new in _changes(node, text, offsets)
    ]
    alike: Counter[str] = Counter()
    numbered = []
    for one in sorted(found, key=lambda one: (one.start, one.end, one.new)):
        alike[one.key] += 1
        numbered.append(replace(one, number=alike[one.key]))
    return numbered


def _bodies(node: ast.AST, name: str) -> Iterator[tuple[str, ast.AST]]:
    """Walk the nodes inside functions that may be changed, and name the functions."""
    if isinstance(node, _FUNCTIONS):
        inner = f"{name}.{node.name}".lstrip(".")
        documented = ast.get_docstring(node) is not None
        for statement in node.body[1:] if documented else node.body:
            yield from _inside(statement, inner)
        return
    if isinstance(node, ast.ClassDef):
        name = f"{name}.{node.name}".lstrip(".")
    for child in ast.iter_child_nodes(node):
        yield from _bodies(child, name)


def _inside(node: ast.AST, name: str) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
        yield from _bodies(node, name)
        return
    if isinstance(node, _TEXT) or getattr(node, "arg", None) in _HINTS:
        return
    yield name, node
    for field, value in ast.iter_fields(node):
        if field == "annotation":
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _inside(child, name)


_Change = tuple[str, tuple[int, int], str]


def _changes(  # noqa: PLR0912 - one branch for each operator
    node: ast.AST, text: str, offsets: list[int]
) -> Iterator[_Change]:
    """List the changes of one node: what kind, where, and what stands there then."""

    def span(part: ast.AST) -> tuple[int, int]:
        placed: ast.expr = part  # type: ignore[assignment]
        start = offsets[placed.lineno - 1] + placed.col_offset
        end = offsets[(placed.end_lineno or 0) - 1] + (placed.end_col_offset or 0)
        return start, end

    def source(part: ast.AST) -> str:
        start, end = span(part)
        return text[start:end]

    match node:
        case ast.Compare():
            terms = [node.left, *node.comparators]
            for i, op in enumerate(node.ops):
                between = span(terms[i])[1], span(terms[i + 1])[0]
                yield from _swap("comparison", between, text, _COMPARISONS[type(op)])
        case ast.BinOp() if not (_is_text(node.left) or _is_text(node.right)):
            between = span(node.left)[1], span(node.right)[0]
            yield from _swap("arithmetic", between, text, _ARITHMETIC[type(node.op)])
        case ast.AugAssign() if not _is_text(node.value):
            between = span(node.target)[1], span(node.value)[0]
            new = f"{_ARITHMETIC[type(node.op)]}="
            yield from _swap("arithmetic", between, text, new)
        case ast.BoolOp():
            new = "or" if isinstance(node.op, ast.And) else "and"
            between = span(node.values[0])[1], span(node.values[1])[0]
            if len(node.values) == 2:
                yield from _swap("boolean", between, text, new)
        case ast.UnaryOp(op=ast.Not()):
            yield "boolean", span(node), f"({source(node.operand)})"
        case ast.Constant(value=bool()):
            yield "constant", span(node), str(not node.value)
        case ast.Constant(value=int() | float() as value):
            yield "constant", span(node), f"({_other(value)!r})"
        case ast.If() if not _has_opposite(node.test):
            yield "swapped branches", span(node.test), f"not ({source(node.test)})"
        case ast.IfExp():
            one, test, other = map(source, (node.body, node.test, node.orelse))
            yield "swapped branches", span(node), f"({other} if {test} else {one})"
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield "dropped statement", span(node), "pass"
        case ast.Return(value=ast.expr() as value) if not _is_false_or_text(value):
            yield "dropped return value", span(node), "return None"
        case _:
            pass
    if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if all(isinstance(one, ast.Attribute | ast.Subscript) for one in targets):
            yield "dropped statement", span(node), "pass"


def _swap(
    operator: str, between: tuple[int, int], text: str, new: str
) -> Iterator[_Change]:
    """Replace the sign between two terms; brackets and comments beside it stay."""
    start, end = between
    gap = text[start:end]
    if "#" in gap:
        return
    sign = gap.strip(" \t\n()")
    if sign:
        start += gap.index(sign)
        yield operator, (start, start + len(sign)), new


def _has_opposite(test: ast.expr) -> bool:
    """Return whether another operator makes a test's opposite of it already."""
    if isinstance(test, ast.Compare):
        return len(test.ops) == 1
    return isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)


def _is_false_or_text(value: ast.expr) -> bool:
    """Return whether None in its place would be the same to most, or a message less."""
    return _is_text(value) or (isinstance(value, ast.Constant) and not value.value)


def _is_text(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_text(node.left) or _is_text(node.right)
    if isinstance(node, ast.JoinedStr):
        return True
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _other(value: float) -> float:
    if isinstance(value, int):
        return value + 1
    return value * 2.0 if value else 1.0
