"""Notice gradients that were clipped while they were still multiplied by the scale.

Clipping leaves exactly its threshold, and people choose thresholds of one or two
digits; what else changes gradients leaves any number, and another one in each step.
"""

import math
from typing import TYPE_CHECKING, Any

import torch

from buoy.torch.gather import Gathered, parameters_of
from buoy.torch.mailbox import Mailbox

if TYPE_CHECKING:
    from buoy.torch.contract import Contract

__all__ = ["Probes"]

_ENOUGH = 3  # looks that must all find the same threshold
_MOST = 16  # looks at one optimizer's gradients, with those that tell nothing
_SMALL = 100.0  # scaled gradients below this are suspiciously small
_HIGH = 2.0**10  # ... at scales from here on


class Probes:
    """The first looks at one optimizer's gradients.  None of them waits."""

    def __init__(self) -> None:
        self.open = True  # something is left to be found out
        self._left = _MOST
        self._mail = Mailbox(every=1)
        self._same: set[tuple[str, float]] | None = None  # thresholds found so far
        self._found = 0

    def look(
        self, scaler: "Contract", optimizer: Any, gathered: Gathered
    ) -> float | None:
        """Look once more; give the scale once clipping is certain."""
        self._left -= 1
        scale = self._hear()
        shared = torch.distributed.is_available() and torch.distributed.is_initialized()
        if len(scaler._losses) == 1 and not shared and not self._mail.waiting:
            if _touched(optimizer, gathered):
                home, _ = scaler._check_scale_growth_tracker("unscale_")
                self._mail.post(_measured(gathered.grads, home))
                scale = self._hear() if scale is None else scale
            else:
                self.open = False
        self.open = self.open and self._left > 0
        return scale

    def _hear(self) -> float | None:
        for (norm, largest, smallest, scale), _ in self._mail.collect():
            if not math.isfinite(norm):
                continue  # an overflow, which clipping hides
            found = {("norm", norm), ("value", largest)}
            rounded = {(kind, _rounded(size)) for kind, size in found if _near(size)}
            self._same = rounded if self._same is None else self._same & rounded
            self._found += 1
            if smallest == largest or scale < _HIGH or not self._same:
                self.open = False
            elif self._found >= _ENOUGH:
                self.open = False
                return scale
        return None


def _touched(optimizer: Any, gathered: Gathered) -> bool:
    """Say whether something has changed all gradients, and no hook of a parameter's."""
    return all(
        grad._version and grad._base is None and grad.numel() for grad in gathered.grads
    ) and not any(
        getattr(owner, "_post_accumulate_grad_hooks", None)
        for owner in parameters_of(optimizer)
    )


def _measured(grads: list[torch.Tensor], scale: torch.Tensor) -> torch.Tensor:
    """Take the norm, the largest and the smallest magnitude but 0, and the scale."""
    some = [grad.float() for grad in grads]
    norms = [torch.linalg.vector_norm(grad) for grad in some]
    largest = [grad.abs().max() for grad in some]
    smallest = [grad.abs().masked_fill(grad == 0, math.inf).min() for grad in some]
    home = scale.device
    return torch.stack(
        [
            torch.linalg.vector_norm(torch.stack([norm.to(home) for norm in norms])),
            torch.stack([size.to(home) for size in largest]).max(),
            torch.stack([size.to(home) for size in smallest]).min(),
            scale.reshape(()),
        ]
    )


def _rounded(size: float) -> float:
    return float(f"{size:.1e}")


def _near(size: float) -> bool:
    return 0.0 < size <= _SMALL and abs(size - _rounded(size)) <= 2e-5 * size
