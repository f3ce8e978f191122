"""Policies by name: built-in, presets, and installed by other packages.

In Python code pass the object; names are for configuration files and the command line.
Other packages use the entry-point group `buoy.policies`; they are imported only when
their name is used, and cannot replace built-in names.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from buoy._core.errors import PolicyError, UnknownPolicyError
from buoy._core.policies.backoff import Backoff
from buoy._core.policies.headroom import Headroom
from buoy._core.policies.lognormal import LogNormal
from buoy._core.policies.loss_ahead import LossAhead
from buoy._core.policies.policy import Policy, lacks
from buoy._core.policies.presets import PRESETS, PeerBackoff, Quirks
from buoy._core.policies.presets.table import check
from buoy._core.policies.static import NoScaling, Static
from buoy._core.policies.torch_rule import TorchRule

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = [
    "CLASSES",
    "GROUP",
    "Listed",
    "listed",
    "policies",
    "policy",
    "saved_classes",
    "state_class",
]

GROUP = "buoy.policies"

CLASSES: dict[str, type[Any]] = {
    "headroom": Headroom,
    "backoff": Backoff,
    "static": Static,
    "none": NoScaling,
    "lognormal": LogNormal,
    "loss_ahead": LossAhead,
}


def saved_classes() -> tuple[type[Any], ...]:
    """Return the classes of built-in policies and states, for saving and loading."""
    policies: tuple[type[Any], ...] = (*CLASSES.values(), PeerBackoff, TorchRule)
    states = dict.fromkeys(map(state_class, policies))
    return (*policies, Quirks, *states)


def state_class(kind: type[Any]) -> type[Any]:
    """Return the class of a built-in policy's state, from the annotation of `init`.

    Not by calling `init`: this is needed when Buoy is imported, and `init` imports the
    backends of the frameworks that are loaded.

    Example:
        >>> state_class(Backoff).__name__
        'BackoffState'
    """
    found = kind.init.__annotations__.get("return")
    if not isinstance(found, type):
        message = (
            f"`{kind.__name__}.init` must be annotated with the class of the state "
            f"that it returns, got {found!r}: saving, loading and JAX find it there. "
            "Write `def init(self) -> MyState`, with the class and not its name."
        )
        raise PolicyError(message)
    return found


@dataclass(frozen=True, slots=True)
class Listed:
    """One line of the list of policies."""

    name: str
    kind: str  # "policy", "preset" or "installed"
    source: str  # the class, the peer and its version, or the distribution
    summary: str
    parameters: dict[str, Any]


def policy(name: str | Policy, /, **parameters: Any) -> Policy:
    """Return a policy by name; presets take the parameter names of the original.

    A policy object is returned unchanged, so every `policy=` argument accepts both.

    Example:
        >>> policy("deepspeed", scale_window=500, delayed_shift=4).init().scale
        65536.0
    """
    if not isinstance(name, str):
        return _passed(name, parameters)
    if name in CLASSES:
        return _built(name, CLASSES[name], parameters)
    if name in PRESETS:
        return _built(name, PRESETS[name].build, parameters)
    return _built(name, _load(name), parameters)


def policies() -> tuple[str, ...]:
    """Return the names of all policies, without importing those of other packages."""
    return (*CLASSES, *sorted(PRESETS), *sorted(set(_installed()) - _taken()))


def listed() -> tuple[Listed, ...]:
    """Return a description of every policy: name, origin, parameters, defaults."""
    rows = [
        Listed(name, "policy", f"buoy.{cls.__name__}", _summary(cls), _defaults(cls))
        for name, cls in CLASSES.items()
    ]
    rows += [
        Listed(row.name, "preset", row.peer, row.summary, row.parameters)
        for row in sorted(PRESETS.values(), key=lambda row: row.name)
    ]
    rows += [
        Listed(name, "installed", _origin(points[0]), points[0].value, {})
        for name, points in sorted(_installed().items())
        if name not in _taken()
    ]
    return tuple(rows)


def _taken() -> set[str]:
    return {*CLASSES, *PRESETS}


def _installed() -> dict[str, list["EntryPoint"]]:
    # Imported here: it costs more than all the rest of `import buoy`.
    from importlib.metadata import entry_points  # noqa: PLC0415

    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        found.setdefault(point.name, []).append(point)
    return found


def _load(name: str) -> Callable[..., Policy]:
    points = _installed().get(name, [])
    if not points:
        raise _unknown(name)
    if len({point.value for point in points}) > 1:
        owners = ", ".join(sorted(_origin(point) for point in points))
        message = (
            f"The policy name {name!r} is claimed by several distributions: {owners}. "
            "Uninstall one, or pass the policy object instead of its name."
        )
        raise UnknownPolicyError(message)
    try:
        built: Callable[..., Policy] = points[0].load()
    except Exception as error:
        message = (
            f"The policy {name!r} of {_origin(points[0])} cannot be loaded from "
            f"{points[0].value!r}: {error!r}. Repair or uninstall that distribution."
        )
        raise UnknownPolicyError(message) from error
    return built


def _origin(point: "EntryPoint") -> str:
    return point.dist.name if point.dist else point.value


def _unknown(name: str) -> UnknownPolicyError:
    names = policies()
    return UnknownPolicyError(
        f"No policy named {name!r}.{_guess(name, names)} Installed: {', '.join(names)}."
    )


def _guess(word: str, words: Iterable[str]) -> str:
    import difflib  # noqa: PLC0415 - needed only to be helpful

    close = difflib.get_close_matches(word.lower(), list(words), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def _passed(given: Any, parameters: dict[str, Any]) -> Policy:
    if problem := lacks(given):
        message = (
            f"`policy` must be a policy or the name of one, got {given!r}. {problem}"
        )
        raise PolicyError(message)
    if parameters:
        message = (
            f"`{next(iter(parameters))}` was given together with a policy object. "
            "Set it where the object is made, or use `dataclasses.replace`."
        )
        raise PolicyError(message)
    made: Policy = given
    return made


def _built(
    name: str, build: Callable[..., Policy], parameters: dict[str, Any]
) -> Policy:
    known = inspect.signature(build).parameters
    for given in parameters:
        if given not in known and _closed(known.values()):
            close = _guess(given, known)
            message = f"{name}: no parameter `{given}`.{close} It takes: "
            raise PolicyError(message + (", ".join(known) or "none") + ".")
    if name in PRESETS and build is PRESETS[name].build:
        check(PRESETS[name], parameters)
    try:
        return build(**parameters)
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        if isinstance(error, PolicyError) and name not in PRESETS:
            raise
        asked = ", ".join(f"{key}={value!r}" for key, value in parameters.items())
        raise PolicyError(f"{name}({asked}): {error}") from error


def _closed(known: Iterable[inspect.Parameter]) -> bool:
    return all(parameter.kind is not parameter.VAR_KEYWORD for parameter in known)


def _defaults(cls: type[Any]) -> dict[str, Any]:
    known = inspect.signature(cls).parameters.values()
    return {p.name: None if p.default is p.empty else p.default for p in known}


def _summary(cls: type[Any]) -> str:
    return (inspect.getdoc(cls) or "").partition("\n")[0]
