"""Save and restore a scaler's state as a plain dict.

With torch's rule the dict has exactly torch's five entries.  A policy or a feature with
state adds one key, `buoy`, which torch's scaler ignores: each class can load the
other's state.
"""

import math
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any, NamedTuple

from buoy._core.bounds import bounds_of
from buoy._core.codec import decode, encode
from buoy._core.errors import BuoyError, BuoyWarning
from buoy._core.formats import FLOAT32_MAX
from buoy._core.ops import single
from buoy._core.policies.policy import Policy
from buoy._core.policies.torch_rule import TorchRule, TorchRuleState
from buoy._core.state import numbers
from buoy._core.warn import warn
from buoy.torch.errors import StateError
from buoy.torch.hooks import Hooks
from buoy.torch.options import Options
from buoy.torch.scale import SMALLEST, Plan, Scale, started_near

__all__ = ["VERSION", "Saved", "checked", "clean_steps", "own_state", "restored"]

VERSION = 1
_TOP = ("groups", "spikes")  # features whose state is next to the policy's
_TORCHS = {  # torch's entries: above which number, and whether they are whole
    "scale": (-math.inf, False),
    "growth_factor": (0.0, False),
    "backoff_factor": (0.0, False),
    "growth_interval": (-(2.0**31), True),
    "_growth_tracker": (-1.0, True),
}
_DEFAULT_SCALE = 2.0**16
_MOST = 2**31 - 1


class Saved(NamedTuple):
    """A loaded state, checked."""

    scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    clean_steps: int  # finite steps since the scale last moved
    parts: dict[str, Any]  # the states of features
    policy: str  # the name of its class
    state: Any  # of the policy; None: only the scale is loaded
    turn: int  # updates so far


def clean_steps(state: Any) -> int:
    """Return a policy's count of finite steps, which torch's growth tracker shows."""
    return int(numbers(state).get("clean_steps", 0))


def own_state(scale: Plan | Scale, hooks: Hooks) -> dict[str, Any]:
    """Return the entry `buoy`, with the state beyond torch's five entries."""
    features = hooks.state_dict()
    kept: dict[str, Any] = {}
    if not isinstance(scale.policy, TorchRule):
        kept["policy"] = encode(scale.policy)
        kept["state"] = encode(scale.plain_state())
        kept["turn"] = scale.turns()
    kept |= {key: features.pop(key) for key in _TOP if key in features}
    if features:
        kept["parts"] = features
    return {"buoy": {"version": VERSION, **kept}} if kept else {}


def checked(state: Any, policy: Policy, options: Options) -> Saved:
    """Check a state before anything is loaded; raise an error that names the entry."""
    if not isinstance(state, dict):
        raise StateError(f"A state must be a dict, got {type(state).__name__}.")
    if not state:
        raise StateError(
            "The source state dict is empty, possibly because it was saved from a "
            "disabled instance of GradScaler. Save from one that is enabled, or do "
            "not load."
        )
    own = state.get("buoy", {"version": VERSION})
    if not isinstance(own, dict) or own.get("version") != VERSION:
        raise StateError(
            f"This state was saved by another release of Buoy: {own!r:.80}. Load it "
            "with that release, or delete its 'buoy' entry to keep only the scale."
        )
    numbers_of_torch = {name: _number(state, name) for name in _TORCHS}
    parts = own.get("parts", {})
    if not isinstance(parts, dict):
        raise _damaged("parts", parts)
    parts = {**parts, **{key: own[key] for key in _TOP if key in own}}
    name = TorchRule.__name__
    kept = None
    turn = 0
    if {"policy", "state", "turn"} & own.keys():
        name, kept, turn = _of_policy(own, policy)
    return Saved(
        _usable(numbers_of_torch["scale"], policy, options),
        numbers_of_torch["growth_factor"],
        numbers_of_torch["backoff_factor"],
        int(numbers_of_torch["growth_interval"]),
        int(numbers_of_torch["_growth_tracker"]),
        parts,
        name,
        kept,
        turn,
    )


def _number(state: dict[str, Any], name: str) -> float:
    """Return one of torch's entries; a scale that cannot be used is replaced later."""
    low, whole = _TORCHS[name]
    value = state.get(name, "missing")
    with suppress(TypeError, ValueError, RuntimeError, OverflowError):
        number = math.nan if isinstance(value, str | bool) else float(value)
        if low < number < _MOST and not (whole and number % 1):
            return int(number) if whole else number
        if name == "scale" and not isinstance(value, str | bool):
            return number
    raise _damaged(name, value)


def _of_policy(own: dict[str, Any], policy: Policy) -> tuple[str, Any, int]:
    """Return the policy's name, its state if this scaler can use it, and its turn."""
    for name in ("policy", "state"):
        if not isinstance(own.get(name), dict):
            raise _damaged(name, own.get(name, "missing"))
    kind = str(own["policy"].get("kind"))
    turn = own.get("turn", 0)
    with suppress(BuoyError):  # a class that is not registered
        kind = type(decode(own["policy"])).__name__
    if type(turn) is not int or not 0 <= turn < _MOST:
        raise _damaged("turn", turn)
    state = decode(own["state"])
    if kind != type(policy).__name__:
        return kind, None, 0
    usual = numbers(policy.init())
    found = numbers(state)
    if usual.keys() != found.keys():
        return kind, None, 0  # the same policy with other options
    lowest = {"scale": SMALLEST, "clean_steps": 0}
    for name, start in usual.items():
        value: Any = found.get(name)
        most = FLOAT32_MAX if type(start) is float else _MOST
        number = isinstance(value, int | float)
        fits = number and lowest.get(name.rpartition(".")[2], -most) <= value <= most
        if isinstance(start, int | float) and not fits:
            raise _damaged(name, value)
    return kind, state, turn


def _damaged(name: str, value: Any) -> StateError:
    return StateError(
        f"This is not the state of a scaler, or a damaged one: its {name!r} is "
        f"{value!r:.120}. Nothing was loaded. Pass what `scaler.state_dict()` returned."
    )


def _usable(scale: float, policy: Policy, options: Options) -> float:
    """Replace a saved scale that cannot be used, with a warning."""
    low, high, _ = bounds_of(policy)
    if not options.has_bounds:
        low = min(low, scale) if scale >= SMALLEST else low
        high = FLOAT32_MAX
    start = scale if 0.0 <= scale < math.inf else _DEFAULT_SCALE
    start = min(max(start, low), high)
    if start != scale:
        warn(
            f"The loaded state has a scale of {scale:g}, which this scaler cannot use: "
            f"its bounds are {low:g} .. {high:g}. It continues from {start:g}.",
            BuoyWarning,
        )
    return start


def restored(saved: Saved, scale: Plan | Scale) -> tuple[Any, int]:
    """Return the policy's state to continue from, and the updates so far."""
    policy = scale.policy
    if isinstance(policy, TorchRule):
        if saved.policy != TorchRule.__name__:
            _warn_of_scale_alone(saved, policy)
        return TorchRuleState(saved.scale, saved.clean_steps), scale.turn
    if saved.state is not None:
        return saved.state, saved.turn
    _warn_of_scale_alone(saved, policy)
    state = started_near(policy, single(saved.scale))
    if "clean_steps" in {field.name for field in fields(state)}:
        state = replace(state, clean_steps=saved.clean_steps)
    return state, scale.turn


def _warn_of_scale_alone(saved: Saved, policy: Policy) -> None:
    name = type(policy).__name__
    also = " with other options" if saved.policy == name else ""
    warn(
        f"The loaded state is from policy {_shown(saved.policy)}{also}, this scaler "
        f"uses {_shown(name)}: only the scale was loaded.",
        BuoyWarning,
    )


def _shown(policy: str) -> str:
    return repr("torch's rule" if policy == TorchRule.__name__ else policy)
