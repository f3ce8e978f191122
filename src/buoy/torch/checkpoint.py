"""Save and restore a scaler's state as a plain dict.

With torch's rule the dict has exactly torch's five entries.  A policy or a feature with
state adds one key, `buoy`, which torch's scaler ignores: each class can load the
other's state.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

from buoy._core.codec import decode
from buoy._core.ops import single
from buoy._core.warn import warn
from buoy.torch.errors import BuoyWarning, StateError
from buoy.torch.hooks import Hooks
from buoy.torch.policy_state import FLOAT32_MAX, SMALLEST
from buoy.torch.scale import Scale

__all__ = ["VERSION", "Saved", "checked", "load", "own_state"]

VERSION = 1
_TOP = ("groups", "spikes")  # features whose state is next to the policy's
_DEFAULT_SCALE = 2.0**16


class Saved(NamedTuple):
    """A loaded state, checked."""

    scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    clean_steps: int  # finite steps since the scale last moved
    own: dict[str, Any]  # Buoy's entry


def own_state(rule: Scale, hooks: Hooks) -> dict[str, Any]:
    """Return the entry `buoy`, with the state beyond torch's five entries."""
    features = hooks.state_dict()
    kept = rule.state_dict()
    kept |= {key: features.pop(key) for key in _TOP if key in features}
    if features:
        kept["parts"] = features
    return {"buoy": {"version": VERSION, **kept}} if kept else {}


def checked(state: Any, rule: Scale) -> Saved:
    """Check a state; raise a StateError that names what is wrong."""
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
    return Saved(
        _usable(_number(state, "scale"), rule),
        _number(state, "growth_factor"),
        _number(state, "backoff_factor"),
        int(_number(state, "growth_interval")),
        int(_number(state, "_growth_tracker")),
        own,
    )


def _number(state: dict[str, Any], name: str) -> float:
    try:
        value = state[name]
        return value if isinstance(value, int) else float(value)
    except KeyError:
        found = f"it has no {name!r}, only {', '.join(map(repr, state))!s:.120}"
    except (TypeError, ValueError):
        found = f"its {name!r} is {state[name]!r:.60}, which is no number"
    raise StateError(
        f"This is not the state of a scaler: {found}. Pass what "
        "`scaler.state_dict()` returned."
    )


def _usable(scale: float, rule: Scale) -> float:
    """Replace a saved scale that cannot be used, with a warning."""
    low, high = rule.low, rule.high
    if not rule.bounds_given:
        low = min(low, scale) if scale >= SMALLEST else low
        high = FLOAT32_MAX
    start = scale if 0.0 <= scale < math.inf else _DEFAULT_SCALE
    start = min(max(start, low), high)
    if start != scale:
        warn(
            f"The loaded state has a scale of {scale:g}, which this scaler cannot use: "
            f"its bounds are {low:g} .. {high:g}. It goes on from {start:g}.",
            BuoyWarning,
        )
    return start


def load(saved: Saved, rule: Scale, hooks: Hooks) -> None:
    """Restore a state; without the entry `buoy`, only the scale."""
    own, run = saved.own, rule.run
    state = decode(own["state"]) if "state" in own and run is not None else None
    rule.growth_factor, rule.backoff_factor, rule.growth_interval = saved[1:4]
    parts = {key: own[key] for key in _TOP if key in own}
    hooks.load_state_dict({**own.get("parts", {}), **parts})
    if run is None:
        rule.load(saved.scale, saved.clean_steps)
        return
    if type(state) is type(run.state):
        rule.count_from(int(own.get("turn", 0)))
        rule.restore(state)
        return
    if state is not None:
        warn(
            f"The loaded state is of policy {own['policy'].get('kind')!r}, this scaler "
            f"follows {type(run.policy).__name__!r}: only the scale was taken over.",
            BuoyWarning,
        )
    started = run.started(single(saved.scale))
    if hasattr(started, "clean_steps"):
        started = replace(started, clean_steps=saved.clean_steps)
    rule.restore(started)
