"""What the integrations share: a scaler for a training library, and its metrics."""

import math
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from buoy._core.policies.policy import Policy
from buoy.torch import Extension, GradScaler

__all__ = ["make_scaler", "metrics"]


class Metrics(Extension):
    """Counts skipped steps, and has the norm computed, which then is the check."""

    key = "metrics"

    def __init__(self) -> None:
        self.count = 0

    @torch.no_grad()
    def before_step(self, scaler: Any, work: Any) -> None:
        """Compute the norm of gradients that were neither clipped nor unscaled."""
        ready = work["stage"] is OptState.READY and work.multiplier is None
        if ready and scaler._iteration.scalings:  # else a closure computes them first
            scaler._surveyor.survey_norm(work, 2.0)

    def skipped(self, scaler: Any, work: Any) -> None:
        """Count a skipped step."""
        del scaler, work
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
    last, counter = scaler.last_step, scaler._hooks.find("metrics")
    if last is None or counter is None:
        return {}
    found = {"buoy/scale": last.scale, "buoy/skipped": float(counter.count)}
    if (norm := last.norm) is not None and math.isfinite(norm):
        found["buoy/norm"] = norm
    return found
