"""The settings of a policy that are worth trying."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

from buoy._core.errors import PolicyError
from buoy._core.policies.policy import Policy
from buoy._core.policies.registry import listed
from buoy._core.policies.registry import policy as make

__all__ = ["Family", "Member", "Tunable"]

Tunable = str | Policy | tuple[str, Mapping[str, Any]]

# By the names that our policies and the presets use.
_TRIES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "growth_interval",
            "scale_window",
            "period",
            "interval",
            "patience",
            "N",
            "steps_per_increase",
            "loss_scale_steps",
            "scale_wait",
            "step_window",
            "dynamic_growth_steps",
            "scale_seq_len",
            "incr_every_n_steps",
            "increment_period",
        ),
        (100, 500, 2000),
    ),
    **dict.fromkeys(("backoff_factor", "decr_ratio"), (0.5, 0.25)),
    **dict.fromkeys(("hysteresis", "delayed_shift", "decr_every_n_nan_or_inf"), (1, 2)),
    **dict.fromkeys(("deviations", "overflow_std_dev"), (2.0, 3.09, 4.0)),
    "fp16_scale_growth": (1e-3, 1e-2),
}
_STARTS = ("init_scale", "initial_scale", "init_loss_scale", "init_loss_scaling")


@dataclass(frozen=True, slots=True)
class Member:
    """A policy, and the settings that differ from the given one."""

    policy: Policy
    settings: dict[str, Any]


class Family:
    """One policy under all the settings that are to be tried.

    Example:
        >>> family = Family("torch", {"growth_interval": [100, 2000]}, start=1.0)
        >>> [member.settings for member in family.members()]
        [{}, {'growth_interval': 100}]
    """

    def __init__(
        self,
        given: Tunable,
        tries: Mapping[str, Sequence[Any]] | None,
        start: float,
    ) -> None:
        named, stay = given if isinstance(given, tuple) else (given, {})
        self._named: str | Policy = named
        self._stay = dict(stay)
        self._defaults = _parameters(named)
        self._chosen = tries is not None
        self._tries = dict(_usual(self._defaults, start) if tries is None else tries)

    @property
    def name(self) -> str:
        """The name of the policy."""
        named = self._named
        return named if isinstance(named, str) else type(named).__name__

    def members(self) -> list[Member]:
        """Return the distinct policies, the given one first."""
        found = [Member(self._made({}), {})]
        grid = {k: v for k, v in self._tries.items() if k not in self._stay}
        for values in product(*grid.values()):
            settings = self._changed(dict(zip(grid, values, strict=True)))
            member = self._member(settings)
            if member and all(member.policy != other.policy for other in found):
                found.append(member)
        # Of settings that do the same, the one that changes least comes first.
        return sorted(found, key=lambda member: len(member.settings))

    def _changed(self, settings: dict[str, Any]) -> dict[str, Any]:
        missing = object()
        return {
            name: value
            for name, value in settings.items()
            if self._defaults.get(name, missing) != value
        }

    def _member(self, settings: dict[str, Any]) -> Member | None:
        try:
            return Member(self._made(settings), settings)
        except PolicyError:
            if self._chosen:
                raise
            return None  # a default value that this policy does not accept

    def _made(self, settings: Mapping[str, Any]) -> Policy:
        if isinstance(self._named, str):
            return make(self._named, **{**self._stay, **settings})
        if not settings:
            return make(self._named)
        try:
            return replace(self._named, **settings)  # type: ignore[type-var]
        except TypeError as error:
            message = f"{self.name}: cannot be changed to {settings!r}: {error}."
            raise PolicyError(message) from error


def _parameters(named: str | Policy) -> dict[str, Any]:
    if isinstance(named, str):
        return next((row.parameters for row in listed() if row.name == named), {})
    return {f.name: getattr(named, f.name) for f in fields(make(named))}  # type: ignore[arg-type]


def _usual(defaults: Mapping[str, Any], start: float) -> dict[str, tuple[Any, ...]]:
    """Return the values to try per parameter; `start` is a good initial scale."""
    found: dict[str, tuple[Any, ...]] = {
        name: (defaults[name], start) for name in _STARTS if name in defaults
    }
    found.update({name: _TRIES[name] for name in _TRIES if name in defaults})
    return found
