"""The contract suite: what every policy must satisfy, built-in or not.

Example::

    from buoy.testing import check_policy
    check_policy(MyPolicy(patience=3))

Each clause has a name; a broken one raises `ContractError` naming it, with the smallest
history that shows it.  Needs hypothesis.
"""

import importlib.util
import json
import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from buoy._core.bounds import bounds_of
from buoy._core.codec import decode, encode, register
from buoy._core.errors import BuoyError, MissingBackendError, ScaleCollapsedError
from buoy._core.ops import PLAIN, Ops, Precision, Scalar
from buoy._core.policies.policy import Policy, lacks
from buoy._core.state import Seen, State, map_state
from buoy._core.step import MEASUREMENTS

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

__all__ = ["ContractError", "Opaque", "check_policy", "opaque_ops"]


class _Event(NamedTuple):
    """What happens in one step."""

    finite: bool
    size_log2: float
    share: float
    loss: float


class ContractError(BuoyError, AssertionError):
    """A policy breaks a clause of the contract."""


def check_policy(
    policy: Policy, *, backends: Iterable[str] | None = None, examples: int = 60
) -> None:
    """Raise `ContractError` unless the policy satisfies every clause of the contract.

    `backends` are compared with plain numbers: some of "numpy", "torch" and "jax", by
    default all that are installed.  `examples` is the number of histories tried.

    Example:
        >>> import buoy
        >>> check_policy(buoy.Static(), backends=(), examples=5)
    """
    _check_shape(policy)
    _check_codec(policy)
    _check_start(policy)
    _check_histories(policy, examples)
    _check_no_host_read(policy)
    for backend in _installed() if backends is None else backends:
        _check_backend(policy, backend)


def _fail(clause: str, detail: str) -> ContractError:
    return ContractError(f"{clause}: {detail}")


# --- shape -------------------------------------------------------------------------


def _check_shape(policy: Policy) -> None:
    if problem := lacks(policy):
        raise _fail("policy", f"{policy!r} is none. {problem}")
    for thing, what in ((policy, "policy"), (policy.init(), "state")):
        if not is_dataclass(thing) or isinstance(thing, type):
            raise _fail("frozen", f"the {what} must be a dataclass instance")
        if not type(thing).__dataclass_params__.frozen:  # type: ignore[attr-defined]
            raise _fail("frozen", f"the {what} {type(thing).__name__} must be frozen")
    if policy.init() != policy.init():
        raise _fail("pure", "`init` must give the same state every time")
    extra = set(policy.wants) - {*MEASUREMENTS, "sparse", "loss", "loss_finite"}
    if extra:
        raise _fail("wants", f"unknown measurements {sorted(extra)}")
    if policy.precision not in ("float32", "float64"):
        raise _fail(
            "precision", f"must be float32 or float64, not {policy.precision!r}"
        )


# --- starting elsewhere --------------------------------------------------------------


def _check_start(policy: Policy) -> None:
    """Check `init(scale=...)`."""
    if policy.init(scale=None) != policy.init():
        raise _fail("init", "`scale=None` must mean the same as no `scale`")
    for exponent in (-4, 0, 3, 10, 15):
        scale = 2.0**exponent
        state = policy.init(scale=scale)
        try:
            expected = _changed(policy, "init_scale", scale).init()
        except (TypeError, ValueError):  # no such field, or outside its bounds
            expected = state
        if state != expected:
            detail = f"`scale={scale!r}` gave {state!r}, `init_scale` {expected!r}"
            raise _fail("init", detail)
        hidden = map_state(_reveal, policy.init(scale=Opaque(scale)))
        if hidden != state:
            detail = f"a scale on a device gave {hidden!r}, a plain one {state!r}"
            raise _fail("no host read", detail)


# --- saving ------------------------------------------------------------------------


def _check_codec(policy: Policy) -> None:
    """Check that no field is lost when the policy and its state are saved."""
    register(type(policy))
    register(type(policy.init()))
    for value in (policy, policy.init()):
        for name in _names(value):
            varied = _varied(value, name)
            again = _saved_and_read(varied)
            if again != varied or type(again) is not type(varied):
                detail = f"`{name}` of {type(value).__name__} is lost when saved"
                raise _fail("encode/decode", detail)


def _saved_and_read(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value))))


def _names(value: Any) -> list[str]:
    """List the fields of a dataclass that its constructor takes."""
    return [field.name for field in fields(value) if field.init]


def _varied(value: Any, name: str) -> Any:
    """Change one field to another value that its class accepts."""
    now = getattr(value, name)
    for candidate in _candidates(now):
        try:
            varied = _changed(value, name, candidate)
        except (TypeError, ValueError):
            continue
        if getattr(varied, name) != now:
            return varied
    return value


def _changed(value: Any, name: str, field: object) -> Any:
    return replace(value, **{name: field})


def _candidates(now: object) -> list[Any]:
    """List other values of the same kind."""
    if isinstance(now, bool):
        return [not now]
    if isinstance(now, int):
        return [now + 1, now - 1, now * 2]
    if isinstance(now, float):
        return [now * 2.0, now / 2.0, now * 1.25, now + 0.125, now - 0.125]
    if is_dataclass(now) and not isinstance(now, type):
        return [_varied(now, name) for name in _names(now)]
    if now is None:
        return [2.5, 3, True]
    return []


# --- histories ---------------------------------------------------------------------


def _check_histories(policy: Policy, examples: int) -> None:
    """Try histories until one breaks a clause; hypothesis then shortens it."""
    try:
        from hypothesis import given, settings  # noqa: PLC0415
    except ImportError as error:
        message = "`check_policy` needs hypothesis: pip install hypothesis"
        raise MissingBackendError(message) from error

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
    )
    @given(_histories())
    def run(history: list[_Event]) -> None:
        with suppress(ScaleCollapsedError):  # giving up, in words, is allowed
            _walk(policy, history)

    run()


def _walk(policy: Policy, history: list[_Event]) -> None:
    """Check what must hold in every step of a history."""
    state = policy.init()
    _check_scale(policy, state, "init")
    for event in history:
        looked = policy.foresee(state, event.loss)
        _check_scale(policy, looked, "foresee")
        if looked.scale > state.scale:
            raise _fail("foresee", f"raised {state.scale!r} to {looked.scale!r}")
        seen = _seen(policy, event)
        after = policy.update(looked, seen)
        _check_scale(policy, after, f"update with {seen}")
        if after != policy.update(looked, seen):
            raise _fail("pure", "`update` gave two results for one input")
        if not seen.finite and after.scale > state.scale:
            detail = f"an overflow raised the scale {state.scale!r} to {after.scale!r}"
            raise _fail("overflow", detail)
        if _saved_and_read(after) != after:
            raise _fail("encode/decode", f"{after!r} is not read back as it was")
        state = after


def _check_scale(policy: Policy, state: State, when: str) -> None:
    scale = state.scale
    if not (isinstance(scale, float) and math.isfinite(scale) and scale > 0.0):
        raise _fail("finite", f"after {when} the scale is {scale!r}")
    low, high, _ = bounds_of(policy)
    if not low <= scale <= high:
        raise _fail("bounds", f"after {when} {scale!r} is outside {low!r}..{high!r}")


def _seen(policy: Policy, event: _Event) -> Seen:
    """Return what a policy is shown of an event: only what it wants."""
    values = {
        one.name: event.size_log2 if one.in_log2 else event.share
        for one in MEASUREMENTS.values()
        if one.name in policy.wants
    }
    if "sparse" in policy.wants and event.loss > 1.0:
        values["amax_log2"] = math.nan  # not measured in every step that clips
    return Seen(finite=event.finite, **values)


def _histories() -> "SearchStrategy[list[_Event]]":
    from hypothesis import strategies as st  # noqa: PLC0415

    size = st.one_of(
        st.floats(-40.0, 16.0), st.sampled_from([-math.inf, math.inf, math.nan, 15.99])
    )
    share = st.one_of(st.floats(0.0, 1.0), st.just(math.nan))
    loss = st.one_of(
        st.floats(1e-6, 1e6), st.sampled_from([0.0, -1.0, math.inf, math.nan, 1e30])
    )
    event = st.builds(_Event, st.booleans(), size, share, loss)
    mixed = st.lists(event, max_size=60)
    # Long runs of one kind drive a scale to its bounds, which mixed ones never reach.
    steady = st.builds(lambda one, count: [one] * count, event, st.integers(100, 400))
    return st.one_of(mixed, steady)


# --- no host read ------------------------------------------------------------------


class Opaque:
    """A number that computes but cannot be read, like a tensor on a busy device.

    Example:
        >>> bool(Opaque(1.0) > 0)
        Traceback (most recent call last):
        ...
        buoy.testing.ContractError: no host read: a number was read by __bool__
    """

    __slots__ = ("_hidden",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, hidden: Any) -> None:
        self._hidden = hidden


def _reveal(x: Any) -> Any:
    return x._hidden if isinstance(x, Opaque) else x  # noqa: SLF001


def _forward(name: str) -> Callable[..., Opaque]:
    """Make an operator that computes on the hidden numbers."""

    def operator(self: Opaque, *others: Any) -> Opaque:
        own = _reveal(self)
        hidden = [_reveal(x) for x in others]
        method = getattr(type(own), name, None)
        result = NotImplemented if method is None else method(own, *hidden)
        if result is NotImplemented:  # int with float: compute as floats
            result = getattr(float, name)(float(own), *map(float, hidden))
        return Opaque(result)

    return operator


def _refuse(name: str) -> Callable[..., NoReturn]:
    """Make an operator that would read the number."""

    def operator(self: Opaque, *_: object) -> NoReturn:
        del self
        raise _fail("no host read", f"a number was read by {name}")

    return operator


for _name in (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow "
    "and rand or ror lt le gt ge eq ne neg abs"
).split():
    setattr(Opaque, f"__{_name}__", _forward(f"__{_name}__"))
for _name in ("bool", "float", "int", "index", "round", "floor", "ceil", "trunc"):
    setattr(Opaque, f"__{_name}__", _refuse(f"__{_name}__"))


class _OpaqueOps:
    @staticmethod
    def where(condition: Scalar, if_true: Scalar, if_false: Scalar, /) -> Scalar:
        return Opaque(
            PLAIN.where(_reveal(condition), _reveal(if_true), _reveal(if_false))
        )

    @staticmethod
    def log2(x: Scalar, /) -> Scalar:
        return Opaque(PLAIN.log2(_reveal(x)))

    @staticmethod
    def exp2(x: Scalar, /) -> Scalar:
        return Opaque(PLAIN.exp2(_reveal(x)))

    @staticmethod
    def floor(x: Scalar, /) -> Scalar:
        return Opaque(PLAIN.floor(_reveal(x)))

    @staticmethod
    def cast(x: Scalar, precision: Precision, /) -> Scalar:
        return Opaque(PLAIN.cast(_reveal(x), precision))


_OPAQUE: Ops = _OpaqueOps()
Opaque.__buoy_ops__ = _OPAQUE  # type: ignore[attr-defined]


def opaque_ops() -> Ops:
    """Return the five functions on `Opaque` numbers."""
    return _OPAQUE


def _check_no_host_read(policy: Policy) -> None:
    """Check that the rule computes on numbers that cannot be read, with one result."""
    ops = opaque_ops()
    plain = policy.init()
    state = map_state(Opaque, policy.init())
    for event in _tour():
        seen = _seen(policy, event)
        plain = policy.foresee(plain, event.loss)
        plain = policy.update(plain, seen)
        state = policy.foresee(state, Opaque(event.loss), ops=ops)
        state = policy.update(state, map_state(Opaque, seen), ops=ops)
    if map_state(_reveal, state) != plain:
        raise _fail("no host read", "opaque numbers gave another state than plain ones")


def _tour() -> list[_Event]:
    """Make one history that visits every kind of event."""
    events: list[_Event] = []
    due = MEASUREMENTS["underflow"].due
    for index in range(96):
        several_overflows = 40 <= index < 44
        finite = index % 7 != 6 and not several_overflows
        size_log2 = -math.inf if index % 31 == 30 else float(index % 19) - 6.0
        share = 0.01 * (index % 3) if due(index) else math.nan
        loss = 2.0 ** (index % 23 - 11)
        events.append(_Event(finite, size_log2, share, loss))
    return events


# --- backends ----------------------------------------------------------------------


def _installed() -> tuple[str, ...]:
    names = ("numpy", "torch", "jax")
    return tuple(name for name in names if importlib.util.find_spec(name))


def _check_backend(policy: Policy, backend: str) -> None:
    from buoy._backends.compare import differs  # noqa: PLC0415

    if backend not in ("numpy", "torch", "jax"):
        raise _fail("backends", f"{backend!r} must be numpy, torch or jax")
    problem = differs(policy, backend, [_tour()], _seen)
    if problem:
        raise _fail(f"{backend} equals plain", problem)
