"""A policy's rule as one loop over plain floats, derived from the rule itself.

`foresee` and `update` run once on symbols.  What they compute becomes an expression per
field of the state, and these become the body of a loop without objects and calls.  The
operations are those of `PLAIN`, in the same order, so every state is the same bit for
bit.  Only rules without branches on values can be derived: those that JAX can trace.
Their scales must be powers of two, computed by `exp2`.

Three things make the loop short.  What depends on the scale alone is computed where the
scale changes.  What depends on the loss alone is computed for whole columns.  The usual
step has a body of its own: it is finite, its gradients are in the format's range, and
the fields that such steps leave at their first values have these values.  There they
are constants.
"""

import math
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from itertools import chain, count, cycle, tee
from operator import itemgetter
from typing import Any

from buoy._core.bounds import Bounds
from buoy._core.ops import PLAIN, Ops
from buoy._core.policies.policy import Policy
from buoy._core.replay.symbols import BINARY, Near, Symbol, Tracing, is_power
from buoy._core.state import Seen
from buoy._core.step import MEASUREMENTS

__all__ = ["compiled"]

_FLOORS = ("floor", "//")  # of any number, of finite ones


class _Columns:
    """What depends on the loss alone, by name, to be computed for many steps at once.

    Without NumPy only the loss itself.
    """

    def __init__(self, ops: Ops | None) -> None:
        self.ops = ops
        self.names: dict[Symbol, str] = {}

    def name(self, value: Symbol) -> str | None:
        """Return the name of a column, or None if this is none."""
        whole = self.ops is not None or value.kind == "input"
        if not whole or value.inputs != {"loss"}:
            return None
        return self.names.setdefault(value, f"c{len(self.names)}")

    def of(self, losses: Iterable[list[float]]) -> list[Iterator[float]]:
        """Return the columns, from blocks of losses."""
        count = len(self.names)
        blocks = tee(map(self._block, losses), count)
        return [
            chain.from_iterable(map(itemgetter(at), blocks[at])) for at in range(count)
        ]

    def _block(self, losses: list[float]) -> list[list[float]]:
        done: dict[Any, Any] = {}
        return [
            losses
            if value.kind == "input"
            else self._computed(value, losses, done).tolist()
            for value in self.names
        ]

    def _computed(self, value: Any, losses: list[float], done: dict[Any, Any]) -> Any:
        if not isinstance(value, Symbol):
            return value
        if value not in done:
            kind, parts = value.kind, value.parts
            if kind in _FLOORS and _is_log2(*parts):
                kind, parts = "floor_log2", parts[0].parts
            made = [self._computed(part, losses, done) for part in parts]
            done[value] = self._applied(kind, made, losses)
        return done[value]

    def _applied(self, kind: str, parts: list[Any], losses: list[float]) -> Any:
        ops: Any = self.ops
        if kind == "input":
            return ops.column(losses)
        if kind in _FLOORS:
            return ops.floor(parts[0] / parts[1])
        return (BINARY.get(kind) or getattr(ops, kind))(*parts)


def _is_log2(value: Any, divisor: float) -> bool:
    return bool(value.kind == "log2" and divisor == 1.0)


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
        self.names: dict[Symbol, str] = {}
        self.uses: Counter[Symbol] = Counter()
        for value in wanted:
            self._count(value)
        self.texts = [self.text(value) for value in wanted]

    def _count(self, value: Any) -> None:
        if isinstance(value, Symbol):
            self.uses[value] += 1
            if self.uses[value] == 1:
                for part in value.parts:
                    self._count(part)

    def text(self, value: Any) -> str:
        if not isinstance(value, Symbol):
            return repr(value)
        column = self.columns.name(value)
        if value.kind == "input" or column:
            return column or str(value.parts[0])
        if value in self.names:
            return self.names[value]
        if self.held is not None and value.inputs == {"s_scale"}:
            return self.held.setdefault(_inline(value), f"k{len(self.held)}")
        written = self._written(value)
        if self.uses[value] == 1 and value.kind != "cast":
            return written
        return self._named(value, written)

    def _named(self, value: Symbol, written: str) -> str:
        name = self.names[value] = f"v{len(self.names)}"
        self.lines.append(f"{name} = {written}")
        return name

    def _written(self, value: Symbol) -> str:
        parts = [self.text(part) for part in value.parts]
        if value.kind == "cast":
            self.lines.append(f"single[0] = {parts[0]}")
            return "single[0]"
        return _form(value, parts)


def _inline(value: Any) -> str:
    """Return the text of a symbol without variables."""
    if not isinstance(value, Symbol):
        return repr(value)
    if value.kind == "input":
        return str(value.parts[0])
    return _form(value, [_inline(part) for part in value.parts])


def _form(value: Symbol, parts: list[str]) -> str:
    if value.kind == "/" and is_power(value.parts[1]):
        return f"({parts[0]} * {1.0 / value.parts[1]!r})"  # faster, and the same
    if value.kind in BINARY:
        return f"({parts[0]} {value.kind} {parts[1]})"
    if value.kind == "where":
        return f"({parts[1]} if {parts[0]} else {parts[2]})"
    if value.kind == "neg":
        return f"(-{parts[0]})"
    if value.kind == "exp2":
        return f"(2.0 ** {parts[0]})"
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
    before, step, entered, steady = None, 0, {{}}, {steady}
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
            if steady and not due and {near.low!r} < scaled < {near.high!r}:
                {usual}
            else:
                if scaled < {zero!r}:
                    scaled = -inf
                share = small(step, exponent) if due else None
                if share is not None:
                    {measured}
                else:
                    {finite}
                steady = {steady}
        else:
            skipped.append(step)
            {overflow}
            steady = {steady}
        if s_power != before and not {low!r} <= s_power <= {high!r}:
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
    first = policy.init()
    names = [field.name for field in fields(first)]
    state = type(first)(*(Symbol("input", f"s_{name}") for name in names))
    amax, share = Symbol("input", "scaled"), Symbol("input", "share")
    loss = Symbol("input", "loss") if with_loss else None
    due = MEASUREMENTS["underflow"]
    held: dict[str, str] = {}
    columns = _Columns(ops)
    steady, near = _steady(policy, state, loss, zero_log2)

    def update(before: Any, seen: Seen, indent: int, *, usual: bool = False) -> str:
        after = policy.update(before, seen, ops=Tracing(finite=usual))
        return _body(before, after, indent, held, columns)

    foresee = "pass"
    if loss is not None:
        after = policy.foresee(state, loss, ops=Tracing(finite=True))
        foresee = _body(state, after, 8, None, columns)
    source = _LOOP.format(
        state=", ".join(f"s_{name}" for name in names),
        steady=" and ".join(f"s_{name} == {x!r}" for name, x in steady.items())
        or "True",
        foresee=foresee,
        usual=update(
            _foreseen(policy, replace(state, **steady), loss),
            Seen(True, near),
            16,
            usual=True,
        ),
        measured=update(state, Seen(True, amax, share), 20),
        finite=update(state, Seen(True, amax), 20),
        overflow=update(state, Seen(False, math.inf), 12),
        entered="; ".join(f"{name} = {text}" for text, name in held.items()) or "pass",
        held=", ".join(["exponent", "limit", *held.values()]),
        low=math.log2(bounds.low),
        high=math.log2(bounds.high),
        near=near,
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


def _steady(
    policy: Policy, state: Any, loss: Symbol | None, zero_log2: float
) -> tuple[dict[str, float], Near]:
    """Return the fields that keep their first values in usual steps, and their sizes.

    Usual is a finite step in whose state these fields have these values.
    """
    first, amax = policy.init(), Near("scaled", zero_log2)

    def step(known: dict[str, float]) -> tuple[Any, Any]:
        before = _foreseen(policy, replace(state, **known), loss)
        return before, policy.update(before, Seen(True, amax), ops=Tracing(finite=True))

    kept = {field.name: getattr(first, field.name) for field in fields(first)}
    del kept["scale"]
    before: dict[str, float] = {}
    while before != kept:
        before, (_, after) = kept, step(kept)
        kept = {n: x for n, x in kept.items() if _same(getattr(after, n), x)}
    for name in [*kept]:  # without those that such a step only carries on
        others = {other: x for other, x in kept.items() if other != name}
        entered, after = step(others)
        stays = all(_same(getattr(after, other), x) for other, x in others.items())
        if stays and getattr(after, name) is getattr(entered, name):
            kept = others
    return kept, amax


def _foreseen(policy: Policy, state: Any, loss: Symbol | None) -> Any:
    """Return the state after `foresee`: inputs where it may have changed."""
    if loss is None:
        return state
    after = policy.foresee(state, loss, ops=Tracing())
    changed = {
        field.name: Symbol("input", f"s_{field.name}")
        for field in fields(state)
        if not _same(getattr(after, field.name), getattr(state, field.name))
    }
    return replace(state, **changed)


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
