"""The operations of a rule, recorded instead of computed.

A rule that is called with symbols returns symbols: what it computes, as a tree.  Only
rules without branches on values can be recorded, those that JAX can trace.
"""

import math
from collections.abc import Callable
from operator import add, and_, eq, floordiv, ge, gt, le, lt, mul, or_, sub, truediv
from typing import Any

from buoy._core.ops import PLAIN

__all__ = ["BINARY", "Near", "Symbol", "Tracing", "is_power"]

BINARY = {
    "+": add, "-": sub, "*": mul, "/": truediv, "//": floordiv, "<": lt, "<=": le,
    ">": gt, ">=": ge, "==": eq, "and": and_, "or": or_,
}  # fmt: skip


class Symbol:
    """A number that is known only when the loop runs."""

    def __init__(self, kind: str, *parts: Any) -> None:
        self.kind = kind
        self.parts = parts
        inner = (part.inputs for part in parts if isinstance(part, Symbol))
        self.inputs: set[str] = {parts[0]} if kind == "input" else set().union(*inner)

    def __bool__(self) -> bool:
        raise TypeError("the rule branches on a value")

    def __neg__(self) -> "Symbol":
        return Symbol("neg", self)

    __hash__ = object.__hash__


def _operator(kind: str, *, swapped: bool = False) -> Callable[[Any, Any], Any]:
    def operate(one: Any, other: Any) -> Any:
        if kind in ("and", "or") and isinstance(other, bool):
            return one if other == (kind == "and") else other
        if kind == "*" and not isinstance(other, Symbol) and other == 1.0:
            return one
        if kind == "+" and _is_zero(one) and not isinstance(other, Symbol) and other:
            return other
        parts = (other, one) if swapped else (one, other)
        known = {BINARY[kind](*each) for each in _branches(*parts)}
        return known.pop() if len(known) == 1 else Symbol(kind, *parts)

    return operate


def _is_zero(value: Symbol) -> bool:
    """Return whether this is a product with 0; the numbers of a state are finite."""
    return value.kind == "*" and any(type(x) is float and x == 0.0 for x in value.parts)


def _branches(*parts: Any) -> list[tuple[Any, Any]]:
    """Return the possible operands if one is a `where` of two numbers, else nothing."""
    for at, part in enumerate(parts):
        if isinstance(part, Symbol) and part.kind == "where":
            chosen, other = part.parts[1:], parts[1 - at]
            if not any(isinstance(x, Symbol) for x in (*chosen, other)):
                return [(x, other) if at == 0 else (other, x) for x in chosen]
    return []


for _kind, _function in BINARY.items():
    _name = _function.__name__.rstrip("_")
    setattr(Symbol, f"__{_name}__", _operator(_kind))
    setattr(Symbol, f"__r{_name}__", _operator(_kind, swapped=True))


class Near(Symbol):
    """An input between two bounds, which are chosen as the rule asks for them.

    Comparisons with numbers are decided as for 0, and the bounds are set to the numbers
    between which the answers hold.
    """

    def __init__(self, name: str, low: float) -> None:
        super().__init__("input", name)
        self.low, self.high = low, math.inf

    def _bound(self, number: float) -> None:
        if number > 0.0:
            self.high = min(self.high, number)
        else:
            self.low = max(self.low, number)

    def __lt__(self, number: float) -> bool:
        self._bound(number)
        return number > 0.0

    def __gt__(self, number: float) -> bool:
        self._bound(number)
        return not number > 0.0


class Tracing:
    """The five functions of a rule: symbols in, symbols out; numbers as in `PLAIN`.

    With `finite`, `floor` is one of finite numbers.
    """

    def __init__(self, *, finite: bool = False) -> None:
        self.kind = "//" if finite else "floor"

    @staticmethod
    def where(condition: Any, if_true: Any, if_false: Any, /) -> Any:
        if not isinstance(condition, Symbol):
            return PLAIN.where(condition, if_true, if_false)
        return Symbol("where", condition, if_true, if_false)

    def log2(self, x: Any, /) -> Any:
        return Symbol("log2", x) if isinstance(x, Symbol) else PLAIN.log2(x)

    def exp2(self, x: Any, /) -> Any:
        return Symbol("exp2", x) if isinstance(x, Symbol) else PLAIN.exp2(x)

    def floor(self, x: Any, /) -> Any:
        if not isinstance(x, Symbol):
            return PLAIN.floor(x)
        if x.kind == "/" and is_power(x.parts[1]):
            return Symbol(self.kind, x.parts[0], float(x.parts[1]))
        return Symbol(self.kind, x, 1.0)

    def cast(self, x: Any, precision: Any, /) -> Any:
        if not isinstance(x, Symbol):
            return PLAIN.cast(x, precision)
        return Symbol("cast", x) if precision == "float32" else x


def is_power(x: Any) -> bool:
    """Return whether x is a power of two: dividing by it is exact."""
    return isinstance(x, (int, float)) and math.frexp(x)[0] == 0.5
