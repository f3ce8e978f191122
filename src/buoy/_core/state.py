"""What a policy is shown of a step, and the state that it keeps."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeAlias, TypeVar

from buoy._core.ops import Scalar

__all__ = [
    "Seen",
    "State",
    "map_state",
    "numbers",
    "parts",
    "stores_scale",
    "with_numbers",
]

State: TypeAlias = Any  # of a policy: a frozen dataclass of scalars, with a `scale`

_S = TypeVar("_S")


def map_state(function: Callable[..., Scalar], state: _S, *others: _S) -> _S:
    """Apply a function to every number of a state, e.g. to lift it onto a device.

    With `others`, states of the same kind, it gets the numbers of one place in all of
    them.  Fields that are None in the first stay None.

    Example:
        >>> map_state(lambda x: x * 2, Seen(finite=1, amax_log2=3.0))
        Seen(finite=2, amax_log2=6.0, underflow=None, loss_finite=None)
    """

    def mapped(value: Any, *beside: Any) -> Any:
        if value is None:
            return None
        if is_dataclass(value):
            return map_state(function, value, *beside)
        return function(value, *beside)

    states = (state, *others)
    values = {
        field.name: mapped(*(getattr(one, field.name) for one in states))
        for field in fields(state)  # type: ignore[arg-type]
    }
    return type(state)(**values)


def parts(state: State) -> Iterator[State]:
    """Yield a state and the states inside it, which a policy around another has.

    Example:
        >>> [type(part).__name__ for part in parts(Seen(finite=True))]
        ['Seen']
    """
    yield state
    for field in fields(state):
        value = getattr(state, field.name)
        if is_dataclass(value):
            yield from parts(value)


def numbers(state: State) -> dict[str, Scalar]:
    """Return the numbers of a state by name, e.g. "scale", or "inner.scale".

    Example:
        >>> numbers(Seen(finite=True, amax_log2=3.0))
        {'finite': True, 'amax_log2': 3.0}
    """
    found: dict[str, Scalar] = {}
    for field in fields(state):
        value = getattr(state, field.name)
        if is_dataclass(value):
            inside = numbers(value)
            found |= {f"{field.name}.{name}": each for name, each in inside.items()}
        elif value is not None:
            found[field.name] = value
    return found


def with_numbers(state: _S, found: Mapping[str, Scalar]) -> _S:
    """Return a state with these in place of its numbers, by the names of `numbers`.

    Example:
        >>> with_numbers(Seen(finite=0, amax_log2=0), {"finite": 1, "amax_log2": 2})
        ... # doctest: +ELLIPSIS
        Seen(finite=1, amax_log2=2, underflow=None, ...)
    """
    in_order = iter([found[name] for name in numbers(state)])
    return map_state(lambda _: next(in_order), state)


def stores_scale(state: State) -> bool:
    """Return whether the scale is a field, not computed from others.

    Example:
        >>> stores_scale(Seen(finite=True))
        False
    """
    return any(field.name == "scale" for field in fields(state))


@dataclass(frozen=True, slots=True)
class Seen:
    """The findings about one step's gradients, combined over all ranks.

    "Not measured" is None where the host knows that, and NaN on a device.  The fields
    may be tensors or tracers, so they are not validated.

    Example:
        >>> Seen(finite=True, amax_log2=3.5).amax_log2
        3.5
    """

    finite: Scalar  # bool []: no inf or NaN in any gradient
    amax_log2: Scalar = None  # float32 []: log2 of the largest |scaled gradient|
    underflow: Scalar = None  # float32 []: share of nonzero scaled gradients < 2^-20
    loss_finite: Scalar = None  # bool []: no loss was inf or NaN before it was scaled
