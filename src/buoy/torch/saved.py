"""A scaler's state as a plain dict, and as a pickle.

With torch's own rule the dict is torch's, key for key.  Another policy adds one key,
`buoy`, which torch's scaler does not look at; so each class loads the other's.
"""

import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from buoy._core.codec import decode, encode
from buoy._core.errors import StateVersionError
from buoy._core.ops import single
from buoy.torch import aloud, options
from buoy.torch.errors import BuoyWarning
from buoy.torch.governed import Governed
from buoy.torch.names import Names
from buoy.torch.rule import FLOAT32_MAX, SMALLEST, Classic

if TYPE_CHECKING:
    from buoy.torch.persisting import Persisting

__all__ = ["VERSION", "beyond", "growth_tracker", "load_beyond", "pickled", "unpickled"]

VERSION = 1
_TRANSIENT = {
    "_losses", "_history", "_frozen", "_guide", "_reports", "_last", "_mail", "_noted",
    "_traced", "_traced_loss", "_untold", "_listeners", "_recorder", "_parent",
    "_shares", "_healing", "_assumed", "_window", "_origins", "_guards", "_parts",
    "_gap", "_inverted", "_shadow", "_joined_as", "_uneven",
}  # fmt: skip


def beyond(scaler: "Persisting") -> dict[str, Any]:
    """Write what torch's five entries do not hold."""
    rule, kept = scaler._rule, _parts(scaler)
    if isinstance(rule, Governed):
        kept = {
            "policy": encode(rule.rule),
            "state": encode(rule.state),
            "turn": scaler._turn,
            **kept,
        }
    return {"buoy": {"version": VERSION, **kept}} if kept else {}


def _parts(scaler: "Persisting") -> dict[str, Any]:
    """Write what belongs neither to torch's rule nor to a policy."""
    kept: dict[str, Any] = {}
    if groups := scaler._save_groups():
        kept["groups"] = groups
    if scaler._spikes is not None:
        kept["spikes"] = scaler._spikes.saved()
    kept["parts"] = {
        **scaler._unclaimed,
        **{name: part.state_dict() for name, part in scaler._parts.items()},
    }
    return {name: value for name, value in kept.items() if value}


def _load_parts(scaler: "Persisting", kept: Any) -> None:
    if not isinstance(kept, dict) or kept.get("version") != VERSION:
        return
    scaler._load_groups(kept.get("groups", {}))
    if scaler._spikes is not None:
        scaler._spikes.load(kept.get("spikes", []))
    scaler._unclaimed = dict(kept.get("parts", {}))
    for name, part in scaler._parts.items():
        scaler._attach(name, part)


def load_beyond(scaler: "Persisting", saved: dict[str, Any]) -> None:
    """Read it back; a state without it, torch's or another rule's, gives the scale."""
    rule, kept = scaler._rule, saved.get("buoy")
    _load_parts(scaler, kept)
    saved = {**saved, "scale": _usable(scaler, float(saved["scale"]))}
    scaler._init_scale = saved["scale"]
    if isinstance(rule, Classic):
        rule.admit(saved["scale"])
        scale, count = single(saved["scale"]), int(saved["_growth_tracker"])
        if scaler._scale is not None:
            scaler._scale.fill_(scale)
        rule.learn(scaler, scale, count)
        return
    if kept is None or (isinstance(kept, dict) and "state" not in kept):
        _take_scale(scaler, rule, saved)
        return
    if not isinstance(kept, dict) or kept.get("version") != VERSION:
        message = (
            f"This state was saved by another release of Buoy: {kept!r:.80}. Load it "
            "with that release, or delete its 'buoy' entry to keep only the scale."
        )
        raise StateVersionError(message)
    state = decode(kept["state"])
    if type(state) is not type(rule.state):
        _say_other_policy(kept, rule)
        _take_scale(scaler, rule, saved)
        return
    scaler._turn = int(kept["turn"])
    rule.restore(scaler, state)


def _usable(scaler: "Persisting", scale: float) -> float:
    """Mend a saved scale that nothing could go on from, and say so."""
    rule = scaler._rule
    low, high = rule.low, rule.high
    if not rule.fixed:
        low = min(low, scale) if scale >= SMALLEST else low
        high = FLOAT32_MAX
    if scaler._strict or low <= scale <= high:
        return scale
    mended = high if scale > high else low
    if not math.isfinite(scale) or scale < 0.0:
        mended = options.DEFAULTS["init_scale"]
    mended = min(max(mended, low), high)
    aloud.warn(
        f"The loaded state has a scale of {scale:g}, which this scaler cannot use: its "
        f"bounds are {low:g} .. {high:g}. It goes on from {mended:g}.",
        BuoyWarning,
    )
    return mended


def _take_scale(scaler: "Persisting", rule: Governed, saved: dict[str, Any]) -> None:
    state = rule.begun_at(float(saved["scale"]))
    if hasattr(state, "clean_steps"):
        state = replace(state, clean_steps=int(saved["_growth_tracker"]))
    rule.restore(scaler, state)


def _say_other_policy(kept: dict[str, Any], rule: Governed) -> None:
    aloud.warn(
        f"The loaded state is of policy {kept['policy'].get('kind')!r}, this scaler "
        f"follows {type(rule.rule).__name__!r}: only the scale was taken over.",
        BuoyWarning,
    )


def growth_tracker(scaler: "Persisting", stock: Callable[[], int]) -> int:
    """Tell the count of clean steps, of a policy that counts them."""
    if scaler._enabled and isinstance(scaler._rule, Governed):
        count = getattr(scaler._rule.state, "clean_steps", 0)
        return int(count.item() if isinstance(count, torch.Tensor) else count)
    return stock()


def pickled(state: dict[str, Any]) -> dict[str, Any]:
    """Leave out what belongs to one process and one moment."""
    kept = {name: value for name, value in state.items() if name not in _TRANSIENT}
    kept["_gates"] = []
    if "_names" in kept:
        kept["_names"], kept["_rule"] = Names(), kept["_rule"].unbound()
    return kept


def unpickled(scaler: "Persisting", state: dict[str, Any]) -> None:
    """Start afresh what was left out."""
    scaler.__dict__.update(state)
    scaler._last, scaler._untold, scaler._reports = None, None, {}
    scaler._recorder = None
    scaler._parent = scaler._window = scaler._origins = None
    scaler._guards, scaler._parts = [], {}
    if scaler._enabled:
        scaler._begin()
    for group in scaler._groups.values():
        group._parent = weakref.ref(scaler)
        scaler._adopt(group)
