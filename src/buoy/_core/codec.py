"""Encode policies and states as plain, versioned, JSON-compatible dicts, and back.

The fields are those of the dataclasses.  Reading is strict: an unknown version, class
or field is an error, and no code is executed.
"""

import math
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any

from buoy._core.errors import BuoyError, StateVersionError
from buoy._core.ops import Scalar
from buoy._core.policies.presets.quirks import Quirks
from buoy._core.policies.registry import saved_classes

__all__ = ["VERSION", "decode", "encode", "register"]

VERSION = 1
_KINDS: dict[str, type[Any]] = {}


def register(kind: type[Any]) -> type[Any]:
    """Register a policy or state class for `decode`; usable as a decorator.

    Example:
        >>> from dataclasses import dataclass
        >>> @register
        ... @dataclass(frozen=True)
        ... class TideState:
        ...     scale: float
        >>> decode(encode(TideState(2.0)))
        TideState(scale=2.0)
    """
    if not is_dataclass(kind):
        message = f"Only dataclasses can be registered, got {kind!r}."
        raise StateVersionError(message)
    known = _KINDS.setdefault(kind.__name__, kind)
    if known is not kind and known.__module__ != kind.__module__:
        message = (
            f"{kind.__name__!r} is registered already, by {known.__module__}. "
            "Rename the class."
        )
        raise StateVersionError(message)
    _KINDS[kind.__name__] = kind
    return kind


for _kind in saved_classes():
    register(_kind)


def encode(value: Any) -> dict[str, Any]:
    """Encode a policy or a state as a dict of plain numbers, strings and lists.

    If the numbers are on a device, this reads them, and waits for the device.

    Example:
        >>> from buoy._core.policies.static import Static
        >>> encode(Static(init_scale=8.0))
        {'buoy': 1, 'kind': 'Static', 'init_scale': 8.0}
    """
    return {"buoy": VERSION, **_encode(value)}


def decode(saved: Any) -> Any:
    """Decode the result of `encode`.

    Example:
        >>> decode({"buoy": 1, "kind": "Static", "init_scale": 8.0})
        Static(init_scale=8.0)
    """
    if not isinstance(saved, dict) or "buoy" not in saved:
        message = (
            "This is not a policy or state saved by Buoy: it has no `buoy` version. "
            "For another scaler's state use `buoy.import_state`."
        )
        raise StateVersionError(message)
    if type(saved["buoy"]) is not int or saved["buoy"] != VERSION:
        message = (
            f"Saved by version {saved['buoy']!r} of the format; this Buoy reads "
            f"version {VERSION}. Install the Buoy that wrote it, or a newer one."
        )
        raise StateVersionError(message)
    return _decode({name: v for name, v in saved.items() if name != "buoy"})


def _encode(value: Any) -> dict[str, Any]:
    if not is_dataclass(value) or isinstance(value, type):
        message = f"Only policies and states can be saved, got {value!r}."
        raise StateVersionError(message)
    saved: dict[str, Any] = {"kind": type(value).__name__}
    for field in fields(value):
        if field.init:
            saved[field.name] = _plain(getattr(value, field.name))
    return saved


def _plain(value: Scalar) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return _encode(value)
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if not isinstance(value, float):
        return _plain(value.item())
    return value if math.isfinite(value) else repr(value)


def _upgraded(saved: dict[str, Any]) -> dict[str, Any]:
    """Upgrade a preset's `Backoff` saved before presets had their own class."""
    moved = {"quirks", "growth_step"}
    if saved.get("kind") != "Backoff" or not moved <= saved.keys():
        return saved
    if saved["quirks"] != _encode(Quirks()) or saved["growth_step"] is not None:
        return saved | {"kind": "PeerBackoff"}
    return {name: value for name, value in saved.items() if name not in moved}


def _decode(saved: dict[str, Any]) -> Any:
    saved = _upgraded(saved)
    kind = _KINDS.get(str(saved.get("kind")))
    if kind is None:
        message = (
            f"Unknown kind {saved.get('kind')!r}. Known: {', '.join(sorted(_KINDS))}. "
            "To load a class of your own or of another package, call `buoy.register` "
            "with it first."
        )
        raise StateVersionError(message)
    expected = {field.name: field for field in fields(kind) if field.init}
    given = {name: value for name, value in saved.items() if name != "kind"}
    unknown = sorted(set(given) - set(expected))
    missing = sorted(set(expected) - set(given))
    if unknown or missing:
        message = (
            f"{kind.__name__} was saved with other fields: "
            f"unknown {unknown or 'none'}, missing {missing or 'none'}. "
            "It comes from another release of Buoy or was edited."
        )
        raise StateVersionError(message)
    values = {name: _value(kind, name, value) for name, value in given.items()}
    try:
        return kind(**values)
    except (BuoyError, TypeError, ValueError, AttributeError) as error:
        raise StateVersionError(f"Saved {kind.__name__}: {error}") from error


def _value(kind: type[Any], name: str, value: Any) -> Any:
    if name == "scale" and (isinstance(value, bool) or not _is_number(value)):
        raise StateVersionError(
            f"{kind.__name__}: `scale` must be a number, got {value!r}."
        )
    if isinstance(value, dict):
        return _decode(value)
    if isinstance(value, list):
        return tuple(_value(kind, name, item) for item in value)
    if not isinstance(value, str) or name in _words(kind):  # type: ignore[arg-type]
        return value
    if value in ("inf", "-inf", "nan"):
        return float(value)
    message = f"{kind.__name__}: `{name}` must be a number, got {value!r}."
    raise StateVersionError(message)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) or value in ("inf", "-inf")


@lru_cache(maxsize=128)
def _words(kind: type[Any]) -> frozenset[str]:
    """Return the fields that may hold strings, by annotation or default."""
    return frozenset(
        f.name
        for f in fields(kind)
        if isinstance(f.default, str) or "str" in str(f.type) or "Lit" in str(f.type)
    )
