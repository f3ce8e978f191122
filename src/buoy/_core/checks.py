"""Checks of a policy's configuration; errors name field, value and accepted range."""

import math
from typing import Any

from buoy._core.errors import PolicyError

__all__ = [
    "boolean",
    "choice",
    "instance",
    "number",
    "ordered",
    "power_of_two",
    "whole",
]


def number(
    policy: object,
    field: str,
    *,
    above: float = -math.inf,
    below: float = math.inf,
    least: float = -math.inf,
    most: float = math.inf,
    optional: bool = False,
) -> None:
    """Raise unless the field is a real number within the range.

    `above` and `below` are exclusive, `least` and `most` inclusive.
    """
    value = getattr(policy, field)
    if optional and value is None:
        return
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(value, int) and real and abs(value) > 2**1000:
        real = False  # no float holds it
    if (
        real
        and above < value < below
        and least <= value <= most
        and math.isfinite(value)
    ):
        return
    accepted = ["a finite number"]
    if above > -math.inf:
        accepted.append(f"greater than {above:g}")
    if least > -math.inf:
        accepted.append(f"at least {least:g}")
    if below < math.inf:
        accepted.append(f"less than {below:g}")
    if most < math.inf:
        accepted.append(f"at most {most:g}")
    _refuse(
        policy,
        field,
        " ".join(accepted[:2])
        if len(accepted) < 3
        else f"{accepted[0]} {accepted[1]} and {accepted[2]}",
    )


def whole(policy: object, field: str, *, least: int) -> None:
    """Raise unless the field is a whole number of at least `least`."""
    value = getattr(policy, field)
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return
    _refuse(policy, field, f"a whole number of at least {least}")


def instance(policy: object, field: str, kind: type[Any]) -> None:
    """Raise unless the field is an instance of the class."""
    if not isinstance(getattr(policy, field), kind):
        _refuse(policy, field, f"a {kind.__name__}")


def boolean(policy: object, field: str) -> None:
    """Raise unless the field is True or False."""
    if not isinstance(getattr(policy, field), bool):
        _refuse(policy, field, "True or False")


def choice(policy: object, field: str, accepted: tuple[str, ...]) -> None:
    """Raise unless the field is one of the choices."""
    if getattr(policy, field) not in accepted:
        _refuse(policy, field, "one of " + ", ".join(map(repr, accepted)))


def power_of_two(policy: object, field: str) -> None:
    """Raise unless the field is a power of two."""
    number(policy, field, above=0.0)
    if math.frexp(getattr(policy, field))[0] != 0.5:
        _refuse(policy, field, "a power of two")


def ordered(policy: object, lower: str, upper: str) -> None:
    """Raise if the lower bound is above the upper one."""
    low = getattr(policy, lower)
    high = getattr(policy, upper)
    if low > high:
        message = (
            f"{type(policy).__name__}: `{lower}` must not exceed `{upper}`, "
            f"got {low!r} and {high!r}."
        )
        raise PolicyError(message)


def _refuse(policy: object, field: str, accepted: str) -> None:
    message = (
        f"{type(policy).__name__}: `{field}` must be {accepted}, "
        f"got {getattr(policy, field)!r}."
    )
    raise PolicyError(message)
