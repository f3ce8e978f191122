"""A policy's rule as one loop over plain floats, derived from the rule itself.

`foresee` and `update` run once on symbols.  What they compute becomes an expression per
field of the state, and these become the body of a loop without objects and calls.  The
operations are those of `PLAIN`, in the same order, so every state is the same bit for
bit.  Only rules without branches on values can be derived: those that JAX can trace.
Their scales must be powers of two, computed by `exp2`.

Three things make the loop short.  What depends on the scale alone is computed where the
scale changes.  What depends on the loss alone is computed for whole columns.  A finite
step after a finite step has a body of its own, in which the fields that every finite
step sets to the same number are constants.
"""

import math
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from itertools import chain, count, cycle, tee
from operator import add, and_, eq, floordiv, ge, gt, le, lt, mul, or_, sub, truediv
from typing import Any

from buoy._core.bounds import Bounds
from buoy._core.ops import PLAIN, Ops
from buoy._core.policies.policy import Policy
from buoy._core.state import Seen
from buoy._core.step import MEASUREMENTS

__all__ = ["compiled"]

_BINARY = {
    "+": add, "-": sub, "*": mul, "/": truediv, "//": floordiv, "<": lt, "<=": le,
    ">": gt, ">=": ge, "==": eq, "and": and_, "or": or_,
}  # fmt: skip


class _Symbol:
    """A number that is known only when the loop runs."""

    def __init__(self, kind: str, *parts: Any) -> None:
        self.kind = kind
        self.parts = parts
        inner = (part.inputs for part in parts if isinstance(part, _Symbol))
        self.inputs: set[str] = {parts[0]} if kind == "input" else set().union(*inner)

    def __bool__(self) -> bool:
        raise TypeError("the rule branches on a value")

    def __neg__(self) -> "_Symbol":
        return _Symbol("neg", self)

    __hash__ = object.__hash__


def _operator(kind: str, *, swapped: bool = False) -> Callable[[Any, Any], Any]:
    def operate(one: Any, other: Any) -> Any:
        if kind in ("and", "or") and isinstance(other, bool):
            return one if other == (kind == "and") else other
        if kind == "*" and not isinstance(other, _Symbol) and other == 1.0:
            return one
        parts = (other, one) if swapped else (one, other)
        known = {_BINARY[kind](*each) for each in _branches(*parts)}
        return known.pop() if len(known) == 1 else _Symbol(kind, *parts)

    return operate


def _branches(*parts: Any) -> list[tuple[Any, Any]]:
    """Return the possible operands if one is a `where` of two numbers, else nothing."""
    for at, part in enumerate(parts):
        if isinstance(part, _Symbol) and part.kind == "where":
            chosen, other = part.parts[1:], parts[1 - at]
            if not any(isinstance(x, _Symbol) for x in (*chosen, other)):
                return [(x, other) if at == 0 else (other, x) for x in chosen]
    return []


for _kind, _function in _BINARY.items():
    _name = _function.__name__.rstrip("_")
    setattr(_Symbol, f"__{_name}__", _operator(_kind))
    setattr(_Symbol, f"__r{_name}__", _operator(_kind, swapped=True))


class _Tracing:
    """The five functions of a rule: symbols in, symbols out; numbers as in `PLAIN`."""

    @staticmethod
    def where(condition: Any, if_true: Any, if_false: Any, /) -> Any:
        if not isinstance(condition, _Symbol):
            return PLAIN.where(condition, if_true, if_false)
        return _Symbol("where", condition, if_true, if_false)

    def log2(self, x: Any, /) -> Any:
        return _Symbol("log2", x) if isinstance(x, _Symbol) else PLAIN.log2(x)

    def exp2(self, x: Any, /) -> Any:
        return _Symbol("exp2", x) if isinstance(x, _Symbol) else PLAIN.exp2(x)

    def floor(self, x: Any, /) -> Any:
        if not isinstance(x, _Symbol):
            return PLAIN.floor(x)
        if x.kind == "/" and _is_power(x.parts[1]):
            return _Symbol("floor", x.parts[0], float(x.parts[1]))
        return _Symbol("floor", x, 1.0)

    def cast(self, x: Any, precision: Any, /) -> Any:
        if not isinstance(x, _Symbol):
            return PLAIN.cast(x, precision)
        return _Symbol("cast", x) if precision == "float32" else x


def _is_power(x: Any) -> bool:
    """Return whether x is a power of two: dividing by it is exact."""
    return isinstance(x, (int, float)) and math.frexp(x)[0] == 0.5


class _Columns:
    """What depends on the loss alone, by name, to be computed for many steps at once.

    Without NumPy only the loss itself.
    """

    def __init__(self, ops: Ops | None) -> None:
        self.ops = ops
        self.names: dict[_Symbol, str] = {}

    def name(self, value: _Symbol) -> str | None:
        """Return the name of a column, or None if this is none."""
        whole = self.ops is not None or value.kind == "input"
        if not whole or value.inputs != {"loss"}:
            return None
        return self.names.setdefault(value, f"c{len(self.names)}")

    def of(self, losses: Iterable[list[float]]) -> list[Iterator[float]]:
        """Return the columns, from blocks of losses."""
        return [
            chain.from_iterable(self._column(value, block) for block in blocks)
            for value, blocks in zip(
                self.names, tee(losses, len(self.names)), strict=True
            )
        ]

    def _column(self, value: _Symbol, losses: list[float]) -> Iterable[float]:
        if value.kind == "input":
            return losses
        made: list[float] = self._computed(value, losses, {}).tolist()
        return made

    def _computed(self, value: Any, losses: list[float], done: dict[Any, Any]) -> Any:
        if not isinstance(value, _Symbol):
            return value
        if value not in done:
            parts = [self._computed(part, losses, done) for part in value.parts]
            done[value] = self._applied(value.kind, parts, losses)
        return done[value]

    def _applied(self, kind: str, parts: list[Any], losses: list[float]) -> Any:
        ops: Any = self.ops
        if kind == "input":
            return ops.column(losses)
        if kind == "floor":
            return ops.floor(parts[0] / parts[1])
        return (_BINARY.get(kind) or getattr(ops, kind))(*parts)


class _Writer:
    """Writes symbols as Python, those that are used more than once as variables.

    What depends on the scale alone goes to `held`, if given: text to variable.
    """

    def __init__(
        self, wanted: list[Any], held: dict[str, str] | None, columns: _Columns
    ) -> None:
        self.held = held
        self.columns = columns
        self.lines: list[str] = []
        self.names: dict[_Symbol, str] = {}
        self.uses: Counter[_Symbol] = Counter()
        for value in wanted:
            self._count(value)
        self.texts = [self.text(value) for value in wanted]

    def _count(self, value: Any) -> None:
        if isinstance(value, _Symbol):
            self.uses[value] += 1
            if self.uses[value] == 1:
                for part in value.parts:
                    self._count(part)

    def text(self, value: Any) -> str:
        if not isinstance(value, _Symbol):
            return repr(value)
        column = self.columns.name(value)
        if value.kind == "input" or column:
            return column or str(value.parts[0])
        if value in self.names:
            return self.names[value]
        written = self._written(value)
        if self.held is not None and value.inputs == {"s_scale"}:
            return self.held.setdefault(written, f"k{len(self.held)}")
        if self.uses[value] == 1 and value.kind != "cast":
            return written
        return self._named(value, written)

    def _named(self, value: _Symbol, written: str) -> str:
        name = self.names[value] = f"v{len(self.names)}"
        self.lines.append(f"{name} = {written}")
        return name

    def _written(self, value: _Symbol) -> str:
        parts = [self.text(part) for part in value.parts]
        if value.kind == "/" and _is_power(value.parts[1]):
            return f"({parts[0]} * {1.0 / value.parts[1]!r})"  # faster, and the same
        if value.kind in _BINARY:
            return f"({parts[0]} {value.kind} {parts[1]})"
        if value.kind == "where":
            return f"({parts[1]} if {parts[0]} else {parts[2]})"
        if value.kind == "neg":
            return f"(-{parts[0]})"
        if value.kind == "exp2":
            return f"(2.0 ** {parts[0]})"
        if value.kind == "cast":
            self.lines.append(f"single[0] = {parts[0]}")
            return "single[0]"
        if value.kind == "log2":
            return f"(log2(x) if (x := {parts[0]}) > 0 else plain_log2(x))"
        # Of what is not finite, `//` makes NaN.
        return f"(y if (y := (x := {parts[0]}) // {parts[1]}) == y else x)"


_LOOP = """
def loop(
    state, s_power, sizes, losses, enter, small, starts, exponents, skipped,
    *, inf=inf, log2=log2, single=single,
):
    {state}, = state
    before, step, entered = None, 0, {{}}
    for {each} in zip({columns}):
        {foresee}
        if s_power != before:
            if not {low!r} <= s_power <= {high!r}:
                return None
            before = s_power
            if s_power not in entered:
                s_scale = 2.0 ** s_power
                exponent, limit = enter(s_scale)
                {entered}
                entered[s_power] = {held},
            {held}, = entered[s_power]
            starts.append(step)
            exponents.append(exponent)
        if amax <= limit:
            scaled = amax + exponent
            if scaled < {zero!r}:
                scaled = -inf
            share = small(step, exponent) if due else None
            if share is not None:
                {measured}
            elif {again}:
                {usual}
            else:
                {finite}
        else:
            skipped.append(step)
            {overflow}
        if not {low!r} <= s_power <= {high!r}:
            return None
    return 2.0 ** s_power
"""


def compiled(
    policy: Policy,
    bounds: Bounds,
    zero_log2: float,
    *,
    with_loss: bool,
    ops: Ops | None = None,
) -> tuple[Callable[..., float | None], _Columns]:
    """Return the loop of a policy: it appends where the scale moves and what is lost.

    It takes the first state's values, the first scale's exponent, the sizes, what the
    second result makes of the losses (not of their logarithms), a function from a scale
    to its exponent and limit, one for the share of small gradients, and the three
    arrays to append to.  It returns the last scale, or None if a scale left the
    policy's bounds: then only the definition can tell what follows.

    `ops` computes columns, with `PLAIN`'s results bit for bit.

    Example:
        >>> from buoy import Headroom
        >>> from buoy._core.bounds import bounds_of
        >>> policy = Headroom()
        >>> loop, _ = compiled(policy, bounds_of(policy), -25.0, with_loss=False)
        >>> loop.__name__
        'loop'
    """
    names = [field.name for field in fields(policy.init())]
    state = type(policy.init())(*(_Symbol("input", f"s_{name}") for name in names))
    amax, share = _Symbol("input", "scaled"), _Symbol("input", "share")
    tracing, due = _Tracing(), MEASUREMENTS["underflow"]
    held: dict[str, str] = {}
    columns = _Columns(ops)

    def update(before: Any, seen: Seen, indent: int) -> str:
        after = policy.update(before, seen, ops=tracing)
        return _body(before, after, indent, held, columns)

    foresee = "pass"
    if with_loss:
        after = policy.foresee(state, _Symbol("input", "loss"), ops=tracing)
        foresee = _body(state, after, 8, None, columns)
    after = policy.update(state, Seen(True, amax), ops=tracing)
    same = {name: x for name in names if type(x := getattr(after, name)) is float}
    usual = replace(state, **same)
    source = _LOOP.format(
        state=", ".join(f"s_{name}" for name in names),
        foresee=foresee,
        measured=update(state, Seen(True, amax, share), 16),
        finite=update(state, Seen(True, amax), 16),
        again=" and ".join(f"s_{name} == {x!r}" for name, x in same.items()) or "False",
        usual=update(usual, Seen(True, amax), 16),
        overflow=update(state, Seen(False, math.inf), 12),
        entered="; ".join(f"{name} = {text}" for text, name in held.items()) or "pass",
        held=", ".join(["exponent", "limit", *held.values()]),
        low=math.log2(bounds.low),
        high=math.log2(bounds.high),
        zero=zero_log2,
        each=", ".join(["step", "amax", "due", *columns.names.values()]),
        columns="count(), sizes, cycle(dues), *losses",
    )
    known: dict[str, Any] = {
        "inf": math.inf, "nan": math.nan, "log2": math.log2, "plain_log2": PLAIN.log2,
        "single": array("f", [0.0]), "count": count, "cycle": cycle,
        "dues": [due.due(turn) for turn in range(due.every)],
    }  # fmt: skip
    exec(source, known)  # noqa: S102 - text of our own rule's operations, see above
    made: Callable[..., float | None] = known["loop"]
    return made, columns


def _body(
    before: Any, after: Any, indent: int, held: dict[str, str] | None, columns: _Columns
) -> str:
    """Return the statements that take one state to the next."""
    moved = {
        f"s_{field.name}": new
        for field in fields(before)
        if not _same(new := getattr(after, field.name), getattr(before, field.name))
    }
    moved["s_power"] = moved.pop("s_scale").parts[0]
    writer = _Writer(list(moved.values()), held, columns)
    lines = [*writer.lines, *_assigned(dict(zip(moved, writer.texts, strict=True)))]
    return ("\n" + " " * indent).join(lines)


def _assigned(texts: dict[str, str]) -> Iterator[str]:
    """Yield assignments, each after all that read what it overwrites."""
    read = {name: set(re.findall(r"s_\w+", text)) for name, text in texts.items()}
    while texts:
        free = [
            name
            for name in texts
            if not any(name in read[other] for other in texts if other != name)
        ]
        if not free:
            yield f"{', '.join(texts)} = {', '.join(texts.values())}"
            return
        for name in free:
            yield f"{name} = {texts.pop(name)}"


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) is float and one == other)
