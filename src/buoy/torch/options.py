"""The configuration of a scaler, checked once."""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any, Literal

import torch

from buoy._backends import torch as backend
from buoy._core.errors import OptionError
from buoy._core.formats import FLOAT32_MAX
from buoy._core.policies.policy import MIN_SCALE, Policy
from buoy._core.policies.registry import policy as make_policy
from buoy._core.policies.torch_rule import TorchRule
from buoy._core.spikes import SpikeGuard
from buoy._core.watch import PATIENCE, OnStuck
from buoy.torch.scale import SMALLEST, Plan

Fp16Params = Literal["error", "master"]

TORCH_DEFAULTS = {
    "init_scale": 2.0**16,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
}


@dataclass(frozen=True, slots=True)
class TorchNumbers:
    """The three numbers of torch's rule, which its state dict has beside the scale."""

    growth_factor: float
    backoff_factor: float
    growth_interval: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments of `GradScaler` that are values: no models, files or ranks."""

    device: str = "cuda"
    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True
    policy: str | Policy | None = None
    min_scale: float | None = None
    max_scale: float | None = None
    on_stuck: OnStuck = "warn"
    patience: int = PATIENCE
    sync: Literal["auto", "never"] = "auto"
    managed: bool = False
    fp16_params: Fp16Params | None = None
    skip: Literal["independent", "joint"] = "independent"
    spike_guard: Literal["skip", "clip"] | SpikeGuard | None = None

    def __post_init__(self) -> None:
        if not self.enabled:
            return
        for name, fits, must in _RULES:
            value = getattr(self, name)
            with suppress(TypeError):  # None and text do not compare with numbers
                if fits(value):
                    continue
            kind = type(TORCH_DEFAULTS.get(name)).__name__
            cure = f" Convert text to a number first: `{kind}({name})`."
            raise OptionError(
                f"{must.format(name)}, got {value!r}."
                f"{cure if name in TORCH_DEFAULTS else ''}"
            )
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in tuple(choices):
                shown = " or ".join(f"{x!r} ({what})" for x, what in choices.items())
                raise OptionError(f"`{name}` must be {shown}, got {value!r}.")
        if self.managed and self.sync == "never":
            raise OptionError("`managed` reads the device: leave out `sync='never'`.")
        low = self.min_scale
        high = self.max_scale
        init = self.init_scale
        within = (low or 0.0) <= init <= (high or math.inf)
        if self.policy is None and not within:
            raise OptionError(
                f"`init_scale` must lie within `min_scale` and `max_scale`, got "
                f"{init!r} outside of {low!r} .. {high!r}. Pass one within them."
            )
        if self.spike_guard in ("skip", "clip"):
            guard = SpikeGuard(mode=self.spike_guard)
            object.__setattr__(self, "spike_guard", guard)

    def of_torch(self, policy: Policy) -> dict[str, Any]:
        """Return the arguments that `torch.amp.GradScaler` takes."""
        names = ("device", "init_scale", "enabled")
        found = {name: getattr(self, name) for name in names}
        return found | asdict(self.numbers(policy))

    def numbers(self, policy: Policy) -> TorchNumbers:
        """Return the numbers of torch's rule; those of the policy, if it is that."""
        own = policy if isinstance(policy, TorchRule) else self
        return TorchNumbers(own.growth_factor, own.backoff_factor, own.growth_interval)

    @property
    def has_bounds(self) -> bool:
        """Whether bounds of torch's rule were given."""
        given = self.min_scale is not None or self.max_scale is not None
        return given and self.policy is None

    def plan(self) -> Plan:
        """Return the policy, torch's rule by default, and its first state."""
        if self.policy is not None:
            changed = {
                name: value
                for name in (*TORCH_DEFAULTS, "min_scale", "max_scale")
                if (value := getattr(self, name)) != TORCH_DEFAULTS.get(name)
            }
            return Plan.of(make_policy(self.policy, **changed))
        low = self.min_scale
        high = self.max_scale
        return Plan.of(
            TorchRule(
                init_scale=self.init_scale,
                growth_factor=self.growth_factor,
                backoff_factor=self.backoff_factor,
                growth_interval=self.growth_interval,
                min_scale=min(MIN_SCALE, self.init_scale) if low is None else low,
                max_scale=FLOAT32_MAX if high is None else high,
            )
        )


def _usable(scale: float) -> bool:
    return SMALLEST <= scale <= FLOAT32_MAX


def _is_device(x: Any) -> bool:
    with suppress(RuntimeError):  # torch's, for a name that it does not know
        return isinstance(x, str) and bool(torch.device(x).type)
    return False


def _is_guard(x: Any) -> bool:
    return isinstance(x, SpikeGuard) or x in (None, "skip", "clip")


_DEVICE = (
    "`{}` must be a device type that torch has, e.g. `GradScaler('cuda', init_scale)`: "
    "the arguments have the order of torch.amp, not of torch.cuda.amp"
)
_SCALE = "`{}` must be a positive number that float32 can hold, and divide 1 by"
_STEPS = "`{}` must be a whole number of steps"
_GUARD = "`{}` must be None (off), 'skip', 'clip' or a buoy.torch.SpikeGuard"
_RULES: tuple[tuple[str, Callable[[Any], Any], str], ...] = (
    ("device", _is_device, _DEVICE),
    ("growth_interval", lambda x: hasattr(x, "__index__"), _STEPS),
    ("growth_factor", lambda x: x > 1.0, "The growth factor must be > 1.0 (`{}`)"),
    ("backoff_factor", lambda x: x < 1.0, "The backoff factor must be < 1.0 (`{}`)"),
    ("backoff_factor", lambda x: x >= 2.0**-149, "`{}` must be a positive number"),
    ("init_scale", _usable, _SCALE),
    ("min_scale", lambda x: x is None or _usable(x), _SCALE),
    ("max_scale", lambda x: x is None or _usable(x), _SCALE),
    ("spike_guard", _is_guard, _GUARD),
)
_CHOICES: dict[str, dict[str | None, str]] = {
    "sync": {"auto": "read the device where needed", "never": "undo skips on it"},
    "skip": {"independent": "each by its own gradients", "joint": "all or none"},
    "fp16_params": {None: "as torch", "error": "refuse", "master": "copy to FP32"},
}


# -- arguments of methods --------------------------------------------------------------


def checked_threshold(name: str, value: Any, *, wait: bool = False) -> Any:
    """Return a threshold; raise for one that would reverse gradients or write NaN.

    Without `wait` a tensor that only a device has is returned unread: a step that it
    would reverse is skipped by `step.clip`.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.detach().reshape(())
        if not wait and backend.known(value) is None:
            return value
    with suppress(TypeError, ValueError, RuntimeError):  # not one number
        if not isinstance(value, str) and (number := float(value)) >= 0:
            return number
    raise OptionError(
        f"`{name}` must be a number of at least 0, got {value!r:.80}: gradients are "
        "multiplied or cut down to it. Pass `float('inf')` to only measure."
    )


def checked_clip(max_norm: Any, order: Any, *, ranks: bool) -> tuple[Any, float]:
    """Return the threshold and the order of a norm; raise for unusable ones.

    With several ranks, the norm must follow from the norms of its parts.
    """
    if type(max_norm) is not float or not max_norm >= 0:
        max_norm = checked_threshold("max_norm", max_norm)
    if type(order) is float and order > 0:
        return max_norm, order
    with suppress(TypeError, ValueError):
        number = float(order)
        if number > 0 or (number <= 0 and not (ranks and number in (0.0, -math.inf))):
            return max_norm, number
    raise OptionError(
        f"`norm_type` must be the order of a norm, got {order!r:.80}: 2, another "
        "positive number, or `float('inf')`. (0 and -inf have no meaning for gradients "
        "that several ranks hold in parts.)"
    )


_NEW_SCALE = (
    "new_scale should be a float or a 1-element torch.cuda.FloatTensor or "
    "torch.FloatTensor with requires_grad=False."
)


def check_new_scale(value: Any, device: str, options: Options) -> None:
    """Raise for a scale that gradients cannot be divided by."""
    if isinstance(value, torch.Tensor):
        if value.device.type != device or value.numel() != 1 or value.requires_grad:
            raise OptionError(_NEW_SCALE)
    elif not (isinstance(value, (int, float)) and _usable(value)):
        raise OptionError(
            f"{_NEW_SCALE} Got {value!r}; it must be a positive number, and so must be "
            "1 divided by it, which is what gradients are multiplied by."
        )
    elif options.has_bounds:
        low = MIN_SCALE if options.min_scale is None else options.min_scale
        high = FLOAT32_MAX if options.max_scale is None else options.max_scale
        if not low <= value <= high:
            raise OptionError(
                f"new_scale {value!r} is outside of `min_scale` {low!r} .. `max_scale` "
                f"{high!r}, which were given for this scaler. Stay within them, or "
                "make a scaler with other bounds."
            )


def check_factor(name: str, value: Any) -> None:
    """Raise for a factor or an interval that makes the scale unusable."""
    if name == "growth_interval" and not hasattr(value, "__index__"):
        raise OptionError(f"{_STEPS.format(name)}, got {value!r:.80}.")
    number = isinstance(value, Real) and math.isfinite(value)
    if not number or (value <= 0 and name != "growth_interval"):
        raise OptionError(
            f"`{name}` must be a finite number; factors must be greater than 0, got "
            f"{value!r}: the scale would become 0, negative or NaN."
        )
