"""The operations of a policy's rule, recorded instead of computed.

A rule that is called with symbols does its arithmetic on them: each operation makes
another symbol, and goes onto a tape.  Only rules that do not branch on numbers can be
recorded, as only these can be traced by JAX.  What a rule computes from its settings
alone is plain Python and leaves no symbol.
"""

import operator
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from buoy._core.errors import PolicyError
from buoy._core.ops import PLAIN, Precision, Scalar
from buoy._core.policies.policy import Policy
from buoy._core.state import Seen, numbers, with_numbers

__all__ = ["Symbol", "operations", "record", "state_fields"]

Tape = list["Symbol"]  # operations, in the order in which the rule asked for them


class Symbol:
    """A number that is not known: an input, or an operation on other numbers."""

    def __init__(self, tape: Tape, kind: str, *parts: Any) -> None:
        self.tape = tape
        self.kind = kind  # "input", a function of `operator`, or one of the five
        self.parts = parts  # the input's name, or the operands

    def __bool__(self) -> bool:
        message = (
            "The rule branches on a number. It cannot be recorded, and JAX cannot "
            "trace it. Use `ops.where`, `&` and `|` in place of `if`, `and` and `or`."
        )
        raise PolicyError(message)

    __hash__ = object.__hash__


def _recorded(kind: str, *parts: Any) -> Symbol:
    """Return an operation, at least one of whose operands is a symbol."""
    tape: Tape = next(part.tape for part in parts if isinstance(part, Symbol))
    made = Symbol(tape, kind, *parts)
    tape.append(made)
    return made


def _forward(kind: str) -> Callable[..., Symbol]:
    return lambda *operands: _recorded(kind, *operands)


def _reflected(kind: str) -> Callable[..., Symbol]:
    return lambda right, left: _recorded(kind, left, right)


_ARITHMETIC = (
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv,
    operator.mod, operator.pow, operator.and_, operator.or_, operator.xor,
)  # fmt: skip
_OTHERS = (
    operator.lt, operator.le, operator.eq, operator.ne, operator.gt, operator.ge,
    operator.neg, operator.pos, operator.abs, operator.invert,
)  # fmt: skip

for _function in (*_ARITHMETIC, *_OTHERS):
    _name = _function.__name__.rstrip("_")
    setattr(Symbol, f"__{_name}__", _forward(_name))
for _function in _ARITHMETIC:
    _name = _function.__name__.rstrip("_")
    setattr(Symbol, f"__r{_name}__", _reflected(_name))


class _SymbolOps:
    """The five functions of a rule: recorded for symbols, computed for numbers."""

    @staticmethod
    def where(condition: Scalar, if_true: Scalar, if_false: Scalar, /) -> Scalar:
        return _applied("where", condition, if_true, if_false)

    @staticmethod
    def log2(x: Scalar, /) -> Scalar:
        return _applied("log2", x)

    @staticmethod
    def exp2(x: Scalar, /) -> Scalar:
        return _applied("exp2", x)

    @staticmethod
    def floor(x: Scalar, /) -> Scalar:
        return _applied("floor", x)

    @staticmethod
    def cast(x: Scalar, precision: Precision, /) -> Scalar:
        return _applied("cast", x, precision)


def _applied(kind: str, *parts: Any) -> Any:
    if any(isinstance(part, Symbol) for part in parts):
        return _recorded(kind, *parts)
    return getattr(PLAIN, kind)(*parts)


_SYMBOLS = _SymbolOps()
Symbol.__buoy_ops__ = _SYMBOLS  # type: ignore[attr-defined] # `ops_of` looks here


def state_fields(policy: Policy) -> tuple[str, ...]:
    """Return the names of the fields that the policy's state uses.

    Example:
        >>> from buoy import Backoff
        >>> state_fields(Backoff(hysteresis=2))
        ('scale', 'clean_steps', 'budget')
    """
    return tuple(numbers(policy.init()))


def record(policy: Policy) -> Tape:
    """Return the operations of one step, in order.

    A step is `update` with everything measured that the policy wants, after `foresee`
    if the policy wants the loss.

    Example:
        >>> from buoy import LogNormal
        >>> [operation.kind for operation in record(LogNormal())[:3]]
        ['cast', 'log2', 'sub']
    """
    tape: Tape = []
    inputs = {name: Symbol(tape, "input", name) for name in state_fields(policy)}
    state = with_numbers(policy.init(), inputs)
    if "loss" in policy.wants:
        state = policy.foresee(state, Symbol(tape, "input", "loss"), ops=_SYMBOLS)
    shown = {field.name for field in fields(Seen)} & policy.wants
    measured = {name: Symbol(tape, "input", name) for name in shown}
    seen = Seen(finite=Symbol(tape, "input", "finite"), **measured)
    policy.update(state, seen, ops=_SYMBOLS)
    return tape


def operations(policy: Policy) -> int:
    """Return how many operations on numbers one step of the policy takes.

    Each arithmetic, comparison and logical operator counts one, and so does each call
    of the five functions.  A result that is used twice is computed once.

    Example:
        >>> from buoy import Backoff, Static
        >>> operations(Static()), operations(Backoff())
        (0, 15)
    """
    return len(record(policy))
