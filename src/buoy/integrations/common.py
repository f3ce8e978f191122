"""What the integrations share: a scaler for a training library, and its metrics."""

import math
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from buoy._core.policies.policy import Policy
from buoy.torch import Extension, GradScaler
from buoy.torch.hooks import Scaler
from buoy.torch.pending import Pending
from buoy.torch.step import measure_norm

__all__ = ["make_scaler", "metrics"]


class Metrics(Extension):
    """Counts skipped steps, and has the norm computed, which then is the check."""

    key = "metrics"

    def __init__(self) -> None:
        self.count = 0

    def before_step(self, scaler: Scaler, pending: Pending) -> None:
        """Compute the norm of gradients that were neither clipped nor unscaled."""
        ready = pending.stage is OptState.READY and pending.factor is None
        if ready and scaler._iteration.scalings:  # else a closure computes them first
            with torch.no_grad():
                measure_norm(scaler, scaler._placed("step"), pending, 2.0)

    def skipped(self, scaler: Scaler, pending: Pending) -> None:
        """Count a skipped step."""
        del scaler, pending
        self.count += 1

    def state_dict(self) -> int:
        """Return the count."""
        return self.count

    def load_state_dict(self, state: int) -> None:
        """Restore the count."""
        self.count = int(state)


def make_scaler(
    device: str,
    policy: str | Policy | None,
    given: dict[str, Any],
    options: dict[str, Any],
) -> GradScaler:
    """Create the scaler of a training library.

    `given` are the library's own numbers for torch's rule; a policy replaces them.
    """
    chosen = dict(given) if policy is None else {"policy": policy}
    scaler = GradScaler(device, **{"managed": True, **chosen, **options})
    if scaler.is_enabled():
        scaler.attach(Metrics())
    return scaler


def metrics(scaler: GradScaler) -> dict[str, float]:
    """Return what to log: `buoy/scale`, `buoy/skipped` and `buoy/norm`.

    The scale and the norm of the last step, and the number of skipped steps so far.
    The norm is left out if the step was skipped.  Reads from the device.
    """
    last = scaler.last_step
    counter = scaler._hooks.find(Metrics)
    if last is None or counter is None:
        return {}
    found = {"buoy/scale": last.scale, "buoy/skipped": float(counter.count)}
    if (norm := last.norm) is not None and math.isfinite(norm):
        found["buoy/norm"] = norm
    return found
