"""A policy's rule as one loop over plain floats, derived from the rule itself.

`foresee` and `update` run once on symbols.  What they compute becomes an expression per
field of the state, and these become the body of a loop without objects and calls.  The
operations are those of `PLAIN`, in the same order, so every state is the same bit for
bit.  Only rules without branches on values can be derived: those that JAX can trace.
"""

import math
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from operator import add, and_, eq, floordiv, ge, gt, le, lt, mul, or_, sub, truediv
from typing import Any

from buoy._core.bounds import Bounds
from buoy._core.ops import PLAIN
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
        return _Symbol(kind, other, one) if swapped else _Symbol(kind, one, other)

    return operate


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
        return _Symbol("floor", x) if isinstance(x, _Symbol) else PLAIN.floor(x)

    def cast(self, x: Any, precision: Any, /) -> Any:
        if not isinstance(x, _Symbol):
            return PLAIN.cast(x, precision)
        return _Symbol("cast", x) if precision == "float32" else x


class _Writer:
    """Writes symbols as Python, those that are used more than once as variables.

    What depends on the scale alone goes to `held`, if given: text to variable.
    """

    def __init__(self, wanted: list[Any], held: dict[str, str] | None) -> None:
        self.held = held
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
        if value.kind == "input":
            return str(value.parts[0])
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
        return f"(y if (y := (x := {parts[0]}) // 1.0) == y else x)"


_LOOP = """
def loop(
    state, sizes, losses, enter, small, starts, exponents, skipped,
    *, inf=inf, log2=log2, single=single,
):
    {state}, = state
    before, step = None, 0
    for step, amax in enumerate(sizes):
        {foresee}
        if s_scale != before:
            if not {low!r} <= s_scale <= {high!r}:
                return None
            before = s_scale
            exponent, limit = enter(s_scale)
            {entered}
            starts.append(step)
            exponents.append(exponent)
        if amax <= limit:
            scaled = amax + exponent
            if scaled < {zero!r}:
                scaled = -inf
            share = small(step, exponent) if step % {every} == {phase} else None
            if share is not None:
                {measured}
            else:
                {finite}
        else:
            skipped.append(step)
            {overflow}
        if not {low!r} <= s_scale <= {high!r}:
            return None
    return s_scale
"""


def compiled(
    policy: Policy, bounds: Bounds, zero_log2: float, *, with_loss: bool
) -> Callable[..., float | None]:
    """Return the loop of a policy: it appends where the scale moves and what is lost.

    It takes the first state's values, the sizes, the losses (not their logarithms), a
    function from a scale to its exponent and limit, one for the share of small
    gradients, and the three arrays to append to.  It returns the last scale, or None if
    a scale left the policy's bounds: then only the definition can tell what follows.

    Example:
        >>> from buoy import Headroom
        >>> from buoy._core.bounds import bounds_of
        >>> policy = Headroom()
        >>> loop = compiled(policy, bounds_of(policy), -25.0, with_loss=False)
        >>> loop.__name__
        'loop'
    """
    names = [field.name for field in fields(policy.init())]
    state = type(policy.init())(*(_Symbol("input", f"s_{name}") for name in names))
    amax, share = _Symbol("input", "scaled"), _Symbol("input", "share")
    ops, due = _Tracing(), MEASUREMENTS["underflow"]

    held: dict[str, str] = {}

    def update(seen: Seen, indent: int) -> str:
        return _body(state, policy.update(state, seen, ops=ops), indent, held)

    foresee = "pass"
    if with_loss:
        after = policy.foresee(state, _Symbol("input", "loss"), ops=ops)
        foresee = _body(state, after, 8, None)
    bodies = {
        "measured": update(Seen(True, amax, share), 16),
        "finite": update(Seen(True, amax), 16),
        "overflow": update(Seen(False, math.inf), 12),
    }
    source = _LOOP.format(
        state=", ".join(f"s_{name}" for name in names),
        foresee=foresee,
        entered="; ".join(f"{name} = {text}" for text, name in held.items()) or "pass",
        **bodies,
        low=bounds.low,
        high=bounds.high,
        zero=zero_log2,
        every=due.every,
        phase=due.phase,
    )
    if with_loss:
        source = source.replace(
            "step, amax in enumerate(sizes)",
            "step, (amax, loss) in enumerate(zip(sizes, losses))",
        )
    known: dict[str, Any] = {
        "inf": math.inf, "nan": math.nan, "log2": math.log2, "plain_log2": PLAIN.log2,
        "single": array("f", [0.0]),
    }  # fmt: skip
    exec(source, known)  # noqa: S102 - text of our own rule's operations, see above
    made: Callable[..., float | None] = known["loop"]
    return made


def _body(before: Any, after: Any, indent: int, held: dict[str, str] | None) -> str:
    """Return the statements that take one state to the next."""
    moved = {
        f"s_{field.name}": getattr(after, field.name)
        for field in fields(before)
        if getattr(after, field.name) is not getattr(before, field.name)
    }
    writer = _Writer(list(moved.values()), held)
    lines = [*writer.lines, f"{', '.join(moved)} = {', '.join(writer.texts)}"]
    return ("\n" + " " * indent).join(lines)
