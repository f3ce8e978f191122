"""The state of each parameter's gradient: scaled, unscaled, cleared, underflowed."""

import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from buoy._backends.torch.exponents import exponents
from buoy._backends.torch.gradients import parameters_of
from buoy.diagnose.estimate import estimate_underflow
from buoy.diagnose.shares import Share
from buoy.trace.counts import Counts

__all__ = ["Clearing", "Looks", "Marks"]

_TRACKED = 4  # parameters per optimizer that are followed
_LOOKS = 3  # the last of which are kept


class Marks:
    """Remembers which parameters' gradients are multiplied by a scale."""

    def __init__(self) -> None:
        self._of: dict[int, str] = {}  # "scaled", "unscaled" or "plain"
        self._scales: dict[int, float] = {}  # that they were last multiplied by
        self.reached: dict[int, torch.Tensor] = {}

    def put(
        self, params: Iterable[torch.Tensor], mark: str, scale: float = 1.0
    ) -> None:
        """Note what the gradients of these are now."""
        for param in params:
            self._of[id(param)], self._scales[id(param)] = mark, scale

    def scale_of(self, params: Iterable[torch.Tensor]) -> float:
        """Tell the largest scale that the gradients of these are multiplied by."""
        return max(self._scales.get(id(param), 1.0) for param in params)

    def reach(self, params: Iterable[torch.Tensor]) -> None:
        """Note that a loss depends on these."""
        for param in params:
            if isinstance(param, torch.nn.Parameter):
                self.reached[id(param)] = param

    def any(self, params: Iterable[torch.Tensor], *marks: str) -> bool:
        """Say whether one of these bears one of the marks."""
        return any(self._of.get(id(param)) in marks for param in params)


class Clearing:
    """Follows a few of an optimizer's gradients from one step to the next."""

    def __init__(self) -> None:
        self._kept: list[list[Any]] = []  # parameter, its gradient, version, cleared

    def look(self) -> None:
        """See whether something was cleared since the last look."""
        for entry in self._kept:
            param, reference, version, cleared = entry
            grad = param.grad
            if cleared:
                continue
            if grad is None or grad is not reference():
                entry[3] = True
            elif grad._version != version:
                entry[3] = not bool(grad.detach().any().item())
                entry[2] = grad._version

    def computed(self) -> None:
        """Note what a backward pass has left, lest it be taken for clearing."""
        for entry in self._kept:
            if entry[0].grad is not None:
                entry[2] = entry[0].grad._version

    def stepped(self, optimizer: Any) -> bool:
        """Reset after a step; return whether nothing was cleared since the last one."""
        self.look()
        stale = bool(self._kept) and not any(entry[3] for entry in self._kept)
        held = [p for p in parameters_of(optimizer) if p.grad is not None]
        self._kept = [
            [p, weakref.ref(p.grad), p.grad._version, False]  # type: ignore[union-attr]
            for p in held[:_TRACKED]
            if not p.grad.is_sparse  # type: ignore[union-attr]
        ]
        return stale


class Looks:
    """Histograms of the last few backward passes, per parameter."""

    def __init__(self) -> None:
        self._seen: deque[dict[int, tuple[torch.Tensor, torch.Tensor]]]
        self._seen = deque(maxlen=_LOOKS)

    def take(self, params: Iterable[torch.Tensor], turn: int) -> None:
        """Count the scaled gradients of matrices, if they are finite."""
        held = [
            p
            for p in params
            if p.dim() > 1 and p.grad is not None and not p.grad.is_sparse
        ]
        if not held:
            return
        counted = exponents([p.grad for p in held if p.grad is not None], turn)
        if counted[:, 255].any():
            return
        self._seen.append({id(p): (p, c) for p, c in zip(held, counted, strict=True)})

    def shares(self) -> list[tuple[torch.Tensor, Share]]:
        """Estimate what was lost of each parameter's gradient."""
        total: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for seen in self._seen:
            for key, (param, counted) in seen.items():
                before = total.get(key)
                total[key] = (param, counted if before is None else before[1] + counted)
        return [
            (param, estimate_underflow(Counts.of_exponents(c.tolist(), param.numel())))
            for param, c in total.values()
        ]
