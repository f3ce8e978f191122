"""Whether an iteration's losses were finite, for policies that want `loss_finite`.

The answer is a number, so that it is sent to other ranks and read on the host together
with the measurements of the gradients: 0 if every loss was finite, inf or NaN if one
was not.  Of several answers the largest counts.
"""

from math import inf, isfinite

import torch

from buoy._backends import torch as backend

__all__ = ["LOSS", "LossCheck", "loss_finite"]

LOSS = "loss_overflow"  # in `Pending.measured`
_KEPT = 64  # losses that are kept before they are combined


def loss_finite(
    number: float | torch.Tensor | None,
) -> bool | torch.Tensor | None:
    """Return the answer as `Seen` has it; None if there was no loss to look at.

    Example:
        >>> loss_finite(0.0), loss_finite(inf), loss_finite(None)
        (True, False, None)
    """
    return None if number is None else number <= 0.0


class LossCheck:
    """The losses of an iteration, before scaling; inspected when its gradients are.

    Example:
        >>> check, cpu = LossCheck(), torch.device("cpu")
        >>> check.add(torch.tensor(3e38), 3e38)
        >>> check.number(cpu)
        0.0
        >>> check.add(torch.tensor(inf), inf)
        >>> check.number(cpu)
        inf
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget the losses: a new iteration begins."""
        self._known: float | None = None  # of the losses whose values the host has
        self._hidden = False  # a loss has no value: in transforms of `torch.func`
        self._kept: tuple[torch.Tensor, ...] = ()  # the others, not inspected yet

    def add(self, loss: torch.Tensor, noted: float | torch.Tensor | None) -> None:
        """Add a loss; `noted` is its value or a copy, if it is a single number."""
        if loss.numel() != 1 or hasattr(loss, "to_local"):  # of a DTensor: its part
            if not (loss.is_floating_point() or loss.is_complex()):
                return  # not a loss
            noted = backend.value_or_copy(backend.magnitude(loss))
        if noted is None:
            self._hidden = True
        elif isinstance(noted, torch.Tensor):
            if len(self._kept) == _KEPT:
                self._kept = (self._zero(self._kept[0].device),)
            self._kept += (noted,)
        elif not isfinite(noted):
            self._known = inf
        elif self._known is None:
            self._known = 0.0

    def add_compiled(self, loss: torch.Tensor) -> None:
        """Add a loss in a compiled graph, which must not depend on their count."""
        self._kept += ((backend.local(loss.detach()) * 0.0).sum(),)
        self._kept = (self._zero(loss.device),)

    def number(self, home: torch.device) -> float | torch.Tensor | None:
        """Return the answer, as a float32 [] on the device if the host lacks it.

        None if there was no loss, or one without a value and no other overflowed.
        """
        if self._known == inf:
            return inf
        if self._hidden:
            return None
        return self._zero(home) if self._kept else self._known

    def _zero(self, home: torch.device) -> torch.Tensor:
        """Return 0 if the kept losses are finite, else NaN."""
        # Of the loss in its own dtype: float32 does not hold every finite float64.
        each = [backend.scalar(one * 0.0, home) for one in self._kept]
        return each[0] if len(each) == 1 else torch.stack(each).sum()
