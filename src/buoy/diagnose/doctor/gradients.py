"""The state of each parameter's gradient: scaled, unscaled, cleared, underflowed."""

import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch.optim import Optimizer

from buoy._backends.torch.exponents import exponents
from buoy._backends.torch.gradients import parameters_of
from buoy.diagnose.estimate import estimate_underflow
from buoy.diagnose.shares import Share
from buoy.trace.counts import Counts

__all__ = ["Clearing", "Looks", "Marks"]

_TRACKED = 4  # parameters per optimizer that are followed
_LOOKS = 3  # the last of which are kept
_NONFINITE = 255  # float32's exponent field of inf and NaN


Mark = Literal["scaled", "unscaled", "plain"]


class Marks:
    """Remembers which parameters' gradients are multiplied by a scale."""

    def __init__(self) -> None:
        # By the id of the parameter.
        self._marks: dict[int, Mark] = {}
        self._scales: dict[int, float] = {}  # that they were last multiplied by
        self.reached: dict[int, torch.nn.Parameter] = {}  # by some loss

    def put(
        self, params: Iterable[torch.Tensor], mark: Mark, scale: float = 1.0
    ) -> None:
        """Note what the gradients of these are now."""
        for param in params:
            self._marks[id(param)] = mark
            self._scales[id(param)] = scale

    def scale_of(self, params: Iterable[torch.Tensor]) -> float:
        """Return the largest scale that the gradients of these are multiplied by."""
        return max(self._scales.get(id(param), 1.0) for param in params)

    def reach(self, params: Iterable[torch.Tensor]) -> None:
        """Note that a loss depends on these."""
        for param in params:
            if isinstance(param, torch.nn.Parameter):
                self.reached[id(param)] = param

    def any(self, params: Iterable[torch.Tensor], *marks: Mark) -> bool:
        """Return whether one of these bears one of the marks."""
        return any(self._marks.get(id(param)) in marks for param in params)


@dataclass(slots=True)
class _Followed:
    """One gradient, as it was after a step."""

    param: torch.Tensor
    grad: weakref.ref[torch.Tensor]
    version: int  # torch's count of writes to it
    cleared: bool = False

    def look(self) -> None:
        """See whether it was cleared: replaced, or filled with zeros."""
        if self.cleared:
            return
        grad = self.param.grad
        if grad is None or grad is not self.grad():
            self.cleared = True
        elif grad._version != self.version:
            self.cleared = not bool(grad.detach().any().item())
            self.version = grad._version


class Clearing:
    """Follows a few of an optimizer's gradients from one step to the next."""

    def __init__(self) -> None:
        self._followed: list[_Followed] = []

    def look(self) -> None:
        """See whether something was cleared since the last look."""
        for followed in self._followed:
            followed.look()

    def computed(self) -> None:
        """Note what a backward pass has left, lest it be taken for clearing."""
        for followed in self._followed:
            if followed.param.grad is not None:
                followed.version = followed.param.grad._version

    def stepped(self, optimizer: Optimizer) -> bool:
        """Reset after a step; return whether nothing was cleared since the last one."""
        self.look()
        cleared = any(followed.cleared for followed in self._followed)
        stale = bool(self._followed) and not cleared
        held = [(p, p.grad) for p in parameters_of(optimizer) if p.grad is not None]
        self._followed = [
            _Followed(param, weakref.ref(grad), grad._version)
            for param, grad in held[:_TRACKED]
            if not grad.is_sparse
        ]
        return stale


class _Histogram(NamedTuple):
    """How often each exponent occurs in the gradient of a parameter."""

    param: torch.Tensor
    counts: torch.Tensor  # int32 [256], by float32's exponent field


class Looks:
    """Histograms of the last few backward passes, per parameter."""

    def __init__(self) -> None:
        self._seen: deque[list[_Histogram]] = deque(maxlen=_LOOKS)

    def take(self, params: Iterable[torch.Tensor], turn: int) -> None:
        """Count the scaled gradients of matrices, if they are finite."""
        matrices: list[torch.Tensor] = []
        grads: list[torch.Tensor] = []
        for param in params:
            if param.dim() > 1 and param.grad is not None and not param.grad.is_sparse:
                matrices.append(param)
                grads.append(param.grad)
        if not grads:
            return
        counted = exponents(grads, turn)
        if not counted[:, _NONFINITE].any():
            self._seen.append(list(map(_Histogram, matrices, counted)))

    def shares(self) -> list[tuple[torch.Tensor, Share]]:
        """Estimate what was lost of each parameter's gradient."""
        total: dict[int, _Histogram] = {}
        for histograms in self._seen:
            for param, counts in histograms:
                before = total.get(id(param))
                added = counts if before is None else before.counts + counts
                total[id(param)] = _Histogram(param, added)
        return [
            (param, estimate_underflow(_counts(param, counts)))
            for param, counts in total.values()
        ]


def _counts(param: torch.Tensor, counts: torch.Tensor) -> Counts:
    return Counts.of_exponents(counts.tolist(), param.numel())
