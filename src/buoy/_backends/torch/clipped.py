"""Detect gradients that were clipped while they were still multiplied by the scale.

Clipping makes one number of many: the norm, or the largest value, is the threshold
whatever it was at the end of the backward pass.  Both are compared, and nothing waits
for the device.
"""

import math
import weakref
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from buoy._backends.torch.gradients import parameters_of
from buoy._backends.torch.measure import norms
from buoy._backends.torch.reader import AsyncReader
from buoy._core.clipped import ENOUGH, SeenScaled, is_threshold

__all__ = ["ClippedWhileScaled"]

_FIRST = 16  # looks at an optimizer's gradients
_AGAIN = 4  # then so many,
_EVERY = 256  # in each so many steps
_KEPT = 16  # looks that are remembered
_HALF = (torch.float16, torch.bfloat16)


class ClippedWhileScaled:
    """Watches the gradients of one scaler's optimizers.

    `loss_scaled` is called with each scaled loss, `look` before gradients are divided
    by the scale.  A backward pass and a look cost two comparisons per optimizer;
    gradients are measured only if they were written between the two.
    """

    def __init__(self) -> None:
        self._watched: dict[int, _Watched] = {}
        self._saved: list[list[float]] = []  # of optimizers that did not step yet

    @property
    def found(self) -> bool:
        """Whether an optimizer's gradients are clipped while they are scaled."""
        return any(one.found for one in self._watched.values())

    @property
    def over(self) -> bool:
        """Whether the last looks at every optimizer show that they are not."""
        every = self._watched.values()
        return all(one.clean >= ENOUGH and not one.found for one in every)

    def loss_scaled(self, scaled: torch.Tensor) -> None:
        """Arrange to compare with the gradients as the backward pass leaves them."""
        watched = [one for one in self._watched.values() if one.left > 0]
        if watched and scaled.requires_grad:
            scaled.register_hook(partial(_begin, weakref.ref(self)))  # type: ignore[no-untyped-call]

    def backward_ended(self) -> None:
        """Note every gradient as it is now."""
        for one in self._watched.values():
            one.backward_ended()

    def look(self, optimizer: Any, scale: torch.Tensor) -> float | None:
        """Look at scaled gradients; return the scale when it is first certain."""
        one = self._watched.get(id(optimizer))
        if one is None or one.optimizer() is not optimizer:
            saved = self._saved.pop(0) if self._saved else None
            one = self._watched[id(optimizer)] = _Watched(optimizer, saved)
        return one.look(scale)

    def state(self) -> list[list[float]]:
        """Return what must be saved for the same result after loading, if anything."""
        every = [*(one.state() for one in self._watched.values()), *self._saved]
        return every if any(one[_Watched.FIELDS :] for one in every) else []

    def load(self, saved: Any) -> None:
        """Restore a state; raise if it is damaged."""
        for one in saved:
            if not all(type(x) in (int, float) and math.isfinite(x) for x in one):
                raise ValueError(f"{one!r:.80} should be finite numbers")
            _Watched(None, one)
        self._watched = {}
        self._saved = [list(one) for one in saved]


class _Watched:
    """One optimizer's gradients."""

    FIELDS = 4  # of a state, before its looks

    def __init__(self, optimizer: Any, saved: Sequence[float] | None = None) -> None:
        try:
            self.optimizer: Any = weakref.ref(optimizer)
        except TypeError:  # no weak references to it, or there is none
            self.optimizer = lambda: optimizer
        left, turn, found, clean, *seen = saved or (_FIRST, 0, 0, 0)
        self.left = int(left)
        self._turn = int(turn)
        self.found = bool(found)
        self.clean = int(clean)
        size = len(SeenScaled._fields)
        self._seen = deque[SeenScaled](maxlen=_KEPT)
        for start in range(0, len(seen), size):
            self._seen.append(SeenScaled(*seen[start : start + size]))
        self._reader = AsyncReader(every=1)
        self._suspect = bool(self._seen)  # gradients were written: measure the next
        self._mark: list[tuple[Any, int]] | None = None
        self._before: torch.Tensor | None = None  # norm and largest value

    def state(self) -> list[float]:
        """Return the numbers that a saved state holds."""
        own = [self.left, self._turn, float(self.found), self.clean]
        return own + [number for seen in self._seen for number in seen]

    def backward_ended(self) -> None:
        """Note the gradients' versions; if they are suspect, their size."""
        optimizer = self.optimizer()
        grads = [] if optimizer is None or self.left <= 0 else _gradients(optimizer)
        if not grads:
            return
        self._mark = [(weakref.ref(one), one._version) for one in _ends(grads)]
        if self._suspect and (now := _sizes(grads)) is not None:
            # Of several passes the largest, as clipping only makes gradients smaller.
            before = self._before
            self._before = now if before is None else torch.maximum(before, now)

    def look(self, scale: torch.Tensor) -> float | None:
        """Compare; return the scale when this is the first look to be certain."""
        mark = self._mark
        before = self._before
        self._mark = self._before = None
        self._turn += 1
        self.left -= self.left > 0
        if self._turn % _EVERY == 0:
            self.left = max(self.left, _AGAIN)
        if self.left <= 0 and mark is None:
            return None
        grads = _gradients(self.optimizer())
        if not grads:
            return None
        if _is_written(grads, mark):
            self._suspect = True
            self._measure(grads, before, scale)
        elif mark is not None or not self.found:
            self._note_clean()
            self._suspect = self._suspect and self.clean < ENOUGH
        scales = [self._judge(seen) for seen, _ in self._reader.collect()]
        return next((one for one in scales if one is not None), None)

    def _note_clean(self) -> None:
        """Note gradients that were not clipped; forget it after several of them."""
        self.clean += 1
        if self.clean >= ENOUGH and self.found:
            self.found = False
            self._seen.clear()

    def _measure(
        self, grads: list[Any], before: torch.Tensor | None, scale: torch.Tensor
    ) -> None:
        now = _sizes(grads)
        if now is None:
            return
        known = torch.zeros_like(now) if before is None else before
        half = [torch.finfo(x.dtype).eps for x in grads if x.dtype in _HALF]
        numbers = [*now, *known, scale.reshape(()).to(now.device, non_blocking=True)]
        numbers.append(torch.full_like(now[0], max(half, default=0.0)))
        self._reader.post(torch.stack(numbers))

    def _judge(self, numbers: list[float]) -> float | None:
        seen = SeenScaled(*numbers)
        if not all(map(math.isfinite, seen)):  # an overflow shows no threshold
            self.left += 1
            return None
        self._seen.append(seen)
        if not (is_threshold(self._seen, 0) or is_threshold(self._seen, 1)):
            self._note_clean()
            return None
        told = self.found
        self.found = True
        self.clean = 0
        return None if told else seen.scale


def _begin(watch: "weakref.ref[ClippedWhileScaled]", _: torch.Tensor) -> None:
    """Ask to be called when this backward pass has ended, after all others who ask.

    DDP and FSDP write the gradients in such a call.
    """
    if torch.compiler.is_dynamo_compiling():
        return
    ask = torch.autograd.Variable._execution_engine.queue_callback
    ask(partial(ask, partial(_ended, watch)))


def _ended(watch: "weakref.ref[ClippedWhileScaled]") -> None:
    held = watch()
    if held is not None:
        held.backward_ended()


def _gradients(optimizer: Any) -> list[Any]:
    """Return the gradients, or this rank's part of each; empty if one is sparse."""
    grads = [param.grad for param in parameters_of(optimizer)]
    there: list[Any] = [grad for grad in grads if grad is not None]
    dense = all(grad.layout is torch.strided for grad in there)
    return there if dense else []


def _ends(grads: list[Any]) -> list[Any]:
    return [grads[0], grads[-1]]


def _is_written(grads: list[Any], mark: list[tuple[Any, int]] | None) -> bool:
    """Return whether gradients were written, or replaced, since the backward pass.

    Without a mark they may have been: backward leaves new ones at version 0.
    """
    if mark is None:
        return all(grad._version for grad in grads)
    return any(
        reference() is not grad or grad._version != version
        for grad, (reference, version) in zip(_ends(grads), mark, strict=True)
    )


@torch.no_grad()
def _sizes(grads: list[Any]) -> torch.Tensor | None:
    """Return the norm and the largest magnitude of all gradients.  float32 [2]."""
    kinds: dict[Any, list[torch.Tensor]] = {}
    for grad in grads:
        part = getattr(grad, "_local_tensor", grad)
        part = torch.view_as_real(part) if part.is_complex() else part
        if part.numel():
            kinds.setdefault((part.device, part.dtype), []).append(part)
    found: list[torch.Tensor] = []
    for alike in kinds.values():
        parts, largest = norms(alike, 2.0, amax=True)
        both = [torch.linalg.vector_norm(torch.stack(parts)).float(), largest]
        found.append(torch.stack([one.float() for one in both if one is not None]))
    if not found:
        return None
    home = found[0].device
    norm, top = torch.stack([one.to(home, non_blocking=True) for one in found]).unbind(
        1
    )
    return torch.stack([torch.linalg.vector_norm(norm), top.max()])
