"""Import the saved states of other scalers.

Each importer takes the dict that its peer saves and returns a policy and the state to
continue from.  What a peer does not save (Megatron saves no configuration) comes from
its preset's defaults, or from keyword arguments.  The page about migrating has a line
for each of the others.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from buoy._core.errors import StateVersionError
from buoy._core.policies.policy import Policy
from buoy._core.policies.registry import policy as make_policy

__all__ = ["SOURCES", "Imported", "import_state"]

Saved = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Imported:
    """A policy and the state to continue from, out of another scaler's checkpoint."""

    source: str
    policy: Policy
    state: Any


@dataclass(frozen=True, slots=True)
class _Source:
    needs: frozenset[str]  # keys that its saved state always has
    knows: frozenset[str]  # keys that it may have
    read: Callable[[dict[str, Any], dict[str, Any]], Imported]


SOURCES: dict[str, _Source] = {}


def import_state(
    saved: Any, source: str | None = None, *, loss_id: int = 0, **parameters: Any
) -> Imported:
    """Read a saved state of torch, apex, DeepSpeed, Megatron or Keras.

    The source is recognised by the keys of the state, or given as `source`.  Objects
    (DeepSpeed pickles its scaler) are read by their attributes.  `parameters` are
    settings of that library that its state does not contain; `loss_id` selects one of
    apex's scalers.

    Example:
        >>> saved = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5,
        ...          "growth_interval": 2000, "_growth_tracker": 7}
        >>> found = import_state(saved)
        >>> found.source, found.state.scale, found.state.clean_steps
        ('torch', 1024.0, 7)
    """
    values = _values(saved, loss_id)
    name = source or _recognise(values)
    if name not in SOURCES:
        raise StateVersionError(f"Cannot read states of {name!r}. {_others()}")
    row = SOURCES[name]
    missing = row.needs - set(values)
    unknown = set(values) - row.needs - row.knows
    if missing or unknown:
        message = (
            f"This is not a known {name} state: missing "
            f"{sorted(missing) or 'nothing'}, unknown {sorted(unknown) or 'nothing'}. "
            "It may come from another version; load it with that library and pass its "
            "numbers to the preset by hand."
        )
        raise StateVersionError(message)
    for key in sorted(row.needs):
        _check_number(name, key, values[key])
    try:
        return row.read(values, parameters)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        if isinstance(error, StateVersionError):
            raise
        message = f"This {name} state cannot be read: {error} It held {values!r}."
        raise StateVersionError(message) from error


_SCALES = {"scale", "loss_scale", "cur_scale", "dynamic_scale"}
# Fall below zero in their own libraries, too.
_SIGNED = {"last_overflow_iter", "hysteresis_tracker", "cur_iter"}


def _check_number(source: str, key: str, value: Any) -> None:
    """Raise unless the field is a number that makes sense; a scale is judged later."""
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    if key in _SCALES:
        fine = real and (isinstance(value, float) or abs(value) < 2**1000)
    else:
        fine = real and abs(value) < 2**63 and (value >= 0 or key in _SIGNED)
    if not fine:
        message = (
            f"This {source} state cannot be read: `{key}` must be a "
            f"{'number' if key in _SCALES else 'finite number, not negative'}, "
            f"got {value!r:.60}. The checkpoint is damaged, or not of {source}."
        )
        raise StateVersionError(message)


def _values(saved: Any, loss_id: int, depth: int = 0) -> dict[str, Any]:
    if depth > 3:
        raise StateVersionError("A saved state must not contain itself.")
    if not isinstance(saved, Mapping):
        saved = getattr(saved, "__dict__", None)
        if not saved:
            message = (
                "A saved state must be a dict or an object with attributes. Pass what "
                "`scaler.state_dict()` returned."
            )
            raise StateVersionError(message)
    for key in (f"loss_scaler{loss_id}", "loss_scaler"):
        if key in saved:  # apex keeps one a loss; ZeRO its scaler beside other things
            return _values(saved[key], loss_id, depth + 1)
    return {str(name): _number(str(name), value) for name, value in saved.items()}


def _number(name: str, value: Any) -> Any:
    item = getattr(value, "item", None)
    if not callable(item):
        return value
    try:
        return item()
    except (TypeError, ValueError, RuntimeError) as error:
        message = f"`{name}` of a saved state must be one number: {error}."
        raise StateVersionError(message) from error


def _others() -> str:
    return (
        f"Known: {', '.join(SOURCES)}. For another library start a policy at the "
        "saved scale; docs/migrate/index.md has a line of code for each."
    )


def _recognise(values: Saved) -> str:
    fits = [
        name
        for name, row in SOURCES.items()
        if row.needs <= set(values) <= row.needs | row.knows
    ]
    if len(fits) == 1:
        return fits[0]
    message = (
        f"Cannot tell which library saved this state, from its keys {sorted(values)}. "
        f"Pass `source=`. {_others()}"
    )
    raise StateVersionError(message)


_Read = Callable[[dict[str, Any], dict[str, Any]], Imported]


def _source(name: str, needs: str, knows: str = "") -> Callable[[_Read], _Read]:
    def enter(read: _Read) -> _Read:
        SOURCES[name] = _Source(
            frozenset(needs.split()), frozenset(knows.split()), read
        )
        return read

    return enter


def _resumed(source: str, policy: Policy, scale: Any, **counters: Any) -> Imported:
    scale = float(scale)
    if not (isfinite(scale) and scale > 0.0):
        message = (
            f"The saved {source} scale is {scale!r}: it had fallen to 0 or overflowed, "
            "so a run cannot continue from it. Start with a new policy, and check the "
            "saved weights for NaN."
        )
        raise StateVersionError(message)
    counters = {name: int(value) for name, value in counters.items()}
    state = replace(policy.init(), scale=scale, **counters)
    return Imported(source, policy, state)


@_source("torch", "scale growth_factor backoff_factor growth_interval _growth_tracker")
def _torch(saved: dict[str, Any], parameters: dict[str, Any]) -> Imported:
    """Read `GradScaler.state_dict()`."""
    policy = make_policy(
        "torch",
        growth_factor=float(saved["growth_factor"]),
        backoff_factor=float(saved["backoff_factor"]),
        growth_interval=int(saved["growth_interval"]),
        **parameters,
    )
    return _resumed(
        "torch", policy, saved["scale"], clean_steps=saved["_growth_tracker"]
    )


@_source("apex", "loss_scale unskipped")
def _apex(saved: dict[str, Any], parameters: dict[str, Any]) -> Imported:
    """Read one scaler of `amp.state_dict()`."""
    policy = make_policy("apex", **parameters)
    return _resumed("apex", policy, saved["loss_scale"], clean_steps=saved["unskipped"])


@_source(
    "deepspeed",
    "cur_scale cur_iter last_overflow_iter scale_factor scale_window",
    "min_scale delayed_shift cur_hysteresis consecutive_hysteresis dtype dynamic "
    "raise_error_at_min_scale dynamic_loss_scale optimizer_state_dict "
    "fp32_groups_flat clip_grad overflow first_gradient_clipping",
)
def _deepspeed(saved: dict[str, Any], parameters: dict[str, Any]) -> Imported:
    """Read a pickled `DynamicLossScaler`, or the dict of an FP16 optimizer."""
    names = (
        "scale_window min_scale delayed_shift consecutive_hysteresis "
        "raise_error_at_min_scale"
    ).split()
    given = {name: saved[name] for name in names if name in saved} | parameters
    if saved["scale_factor"] != 2:
        message = f"its scale factor is 2, not {saved['scale_factor']!r}."
        raise StateVersionError(f"This is not a known DeepSpeed state: {message}")
    if "cur_hysteresis" not in saved:
        given.setdefault("optimizer", "FP16_Optimizer")
    policy = make_policy("deepspeed", **given)
    clean = int(saved["cur_iter"]) - int(saved["last_overflow_iter"]) - 1
    counters = {"clean_steps": (clean - 1) % int(saved["scale_window"])}
    if clean == 0:
        counters["clean_steps"] = -1
    if policy.init().budget is not None:
        counters["budget"] = saved["cur_hysteresis"]
    return _resumed("deepspeed", policy, saved["cur_scale"], **counters)


@_source("megatron", "scale growth_tracker hysteresis_tracker")
def _megatron(saved: dict[str, Any], parameters: dict[str, Any]) -> Imported:
    """Read `DynamicGradScaler.state_dict()`, which holds no configuration."""
    policy = make_policy("megatron", **parameters)
    counters = {"clean_steps": saved["growth_tracker"]}
    if policy.init().budget is not None:
        counters["budget"] = max(0, int(saved["hysteresis_tracker"]))
    return _resumed("megatron", policy, saved["scale"], **counters)


@_source("keras", "step_counter dynamic_scale", "iteration learning_rate")
def _keras(saved: dict[str, Any], parameters: dict[str, Any]) -> Imported:
    """Read the variables of a `LossScaleOptimizer`, by their names."""
    policy = make_policy("keras", **parameters)
    return _resumed(
        "keras", policy, saved["dynamic_scale"], clean_steps=saved["step_counter"]
    )
