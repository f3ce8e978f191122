"""DeepSpeed: `buoy.integrations.deepspeed.use(engine, policy="torch")`.

DeepSpeed checks, unscales and clips the gradients itself.  It tells its scaler only
whether they overflowed, so a policy that measures gradients cannot be used with ZeRO.
"""

import math
from functools import wraps
from typing import Any

import torch

from buoy._core.bounds import initial, moved
from buoy._core.codec import decode, encode
from buoy._core.errors import OptionError
from buoy._core.ops import PLAIN
from buoy._core.policies.policy import Policy
from buoy._core.policies.registry import policy as make_policy
from buoy._core.state import Seen, State
from buoy.integrations.common import make_scaler
from buoy.integrations.common import metrics as metrics_of
from buoy.torch import Extension, GradScaler
from buoy.torch.hooks import Scaler
from buoy.torch.pending import Pending

__all__ = ["LossScaler", "metrics", "use"]


class LossScaler:
    """A policy with the interface of DeepSpeed's loss scalers.

    DeepSpeed updates its scaler before it divides the gradients by the scale.  Here a
    new scale is used from the next loss on.  Pickled, it holds only plain values.
    """

    dynamic = True

    def __init__(self, policy: Policy) -> None:
        if policy.wants:
            name = type(policy).__name__
            read = ", ".join(sorted(policy.wants - {"sparse"}))
            message = (
                f"The policy {name} reads {read}, which DeepSpeed does not show to its "
                "scaler: it only says whether the gradients overflowed. Use 'torch', "
                "'backoff' or 'deepspeed'."
            )
            raise OptionError(message)
        self.policy = policy
        self.state: State = initial(policy)
        self.next: State | None = None  # used from the next loss on
        self.used = float(self.state.scale)  # by the last step
        self.skipped = 0

    @property
    def cur_scale(self) -> float:
        """The scale of the current gradients."""
        return float(self.state.scale)

    @cur_scale.setter
    def cur_scale(self, value: float) -> None:
        self.state = self.policy.init(scale=float(value))
        self.next = None

    loss_scale = cur_scale

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply a loss by the scale."""
        self.state = self._latest
        self.next = None
        return loss * self.cur_scale

    def update_scale(self, overflow: bool) -> None:
        """Compute the next scale, and count a skipped step."""
        self.used = self.cur_scale
        self.skipped += bool(overflow)
        seen = Seen(finite=not overflow)
        self.next = moved(self.policy, self._latest, seen, ops=PLAIN)

    @property
    def _latest(self) -> State:
        return self.state if self.next is None else self.next

    def __getstate__(self) -> dict[str, Any]:
        """Return plain values: a checkpoint of DeepSpeed holds a pickle of this."""
        return {
            "policy": encode(self.policy),
            "state": encode(self._latest),
            "used": self.used,
            "skipped": self.skipped,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.policy = decode(state["policy"])
        self.state = decode(state["state"])
        self.next = None
        self.used = float(state["used"])
        self.skipped = int(state["skipped"])


class _Overflow(Extension):
    """Reports a skipped step to an engine without ZeRO."""

    def stepped(self, scaler: Scaler, pending: Pending) -> None:
        """Set the attribute by which the engine gates its LR scheduler."""
        del scaler
        if pending.outcome is not None:
            pending.optimizer.overflow = not pending.outcome.applied


def use(
    engine: Any, policy: str | Policy | None = None, **options: Any
) -> LossScaler | GradScaler | None:
    """Let a policy of Buoy choose the loss scale of a DeepSpeed engine.

    Call it after `deepspeed.initialize`, before training or `load_checkpoint`.  The
    gradients of every step are then divided by the scale that their loss was multiplied
    by, also when the scale grows.  Under `torch_autocast`, the scale falls after an
    overflow, and clipping acts on unscaled gradients.

    Args:
        engine: a `DeepSpeedEngine`: ZeRO 1, 2 or 3 with `fp16` or `torch_autocast`, or
            stage 0 with `torch_autocast`.
        policy: a policy or its name; with ZeRO one that needs no measurement of the
            gradients, e.g. "torch".  None: DeepSpeed's own rule with the numbers of its
            `fp16` section, or torch's rule under `torch_autocast`.
        options: parameters of a policy given by name; at stage 0 further arguments of
            `buoy.torch.GradScaler`.

    Returns:
        A `LossScaler`, or a `GradScaler` at stage 0; it holds the scale.  None if the
        engine does not train in FP16; nothing is changed then.
    """
    if not hasattr(engine, "torch_autocast_enabled"):
        message = (
            "`use` takes the engine that `deepspeed.initialize` returns, got an object "
            f"of {type(engine).__name__}."
        )
        raise OptionError(message)

    autocast = engine.torch_autocast_enabled()
    if autocast and engine.torch_autocast_dtype() is not torch.float16:
        return None
    if not (autocast or engine.fp16_enabled()):
        return None

    if engine.torch_autocast_z0_gradscaler is not None:
        scaler = make_scaler(engine.device.type, policy, {}, options)
        scaler.attach(_Overflow())
        engine.torch_autocast_z0_gradscaler = scaler
        return scaler

    optimizer = engine.optimizer
    if not hasattr(optimizer, "loss_scaler"):
        message = (
            f"DeepSpeed's {type(optimizer).__name__} (ZeRO stage 0 with `fp16`) has no "
            "loss scaler that could be replaced. Set ZeRO stage 1, 2 or 3, or use "
            "`torch_autocast` with dtype float16 instead of `fp16`."
        )
        raise OptionError(message)
    made = LossScaler(_policy(engine, policy, options, autocast=autocast))
    _replace(optimizer, made)
    return made


def _replace(optimizer: Any, made: LossScaler) -> None:
    """Replace the scaler of a ZeRO optimizer, also after a checkpoint was loaded."""
    optimizer.loss_scaler = made
    optimizer.dynamic_loss_scale = True
    optimizer.torch_autocast_gradscaler = None  # it never sees an overflow
    optimizer.check_grad_overflow = True
    load = optimizer.load_state_dict

    @wraps(load)
    def load_state_dict(*args: Any, **kwargs: Any) -> Any:
        result = load(*args, **kwargs)  # puts what was pickled in our place
        loaded = optimizer.loss_scaler
        if isinstance(loaded, LossScaler):
            made.__setstate__(loaded.__getstate__())
        elif loaded is not made:
            made.cur_scale = loaded.cur_scale  # DeepSpeed's own
        optimizer.loss_scaler = made
        optimizer.dynamic_loss_scale = True
        return result

    optimizer.load_state_dict = load_state_dict


def _policy(
    engine: Any,
    policy: str | Policy | None,
    options: dict[str, Any],
    *,
    autocast: bool,
) -> Policy:
    """Make the policy that was asked for, or that of the engine's configuration."""
    if policy is not None:
        return make_policy(policy, **options)
    if autocast:
        return make_policy("torch", **options)
    if not engine.dynamic_loss_scale():
        return make_policy("static", **{"init_scale": engine.loss_scale(), **options})
    given = engine.dynamic_loss_scale_args() or {}
    return make_policy("deepspeed", **{**given, **options})


def metrics(engine: Any) -> dict[str, float]:
    """Return what to log: `buoy/scale`, `buoy/skipped` and `buoy/norm`.

    The norm is the engine's own; it is left out if the step was skipped.
    """
    if isinstance(engine.torch_autocast_z0_gradscaler, GradScaler):
        return metrics_of(engine.torch_autocast_z0_gradscaler)
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if not isinstance(scaler, LossScaler):
        return {}
    found = {"buoy/scale": scaler.used, "buoy/skipped": float(scaler.skipped)}
    norm = engine.get_global_grad_norm()
    if norm is not None and math.isfinite(norm):
        found["buoy/norm"] = float(norm)
    return found
