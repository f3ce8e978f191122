"""Notice mistakes that would train badly without a word, and name them once.

Everything that costs time is done on the first loss, on an optimizer's first steps, or
after a skip; a correct loop is never told anything.
"""

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from buoy.torch import aloud, holes, inside, words
from buoy.torch.errors import BuoyWarning
from buoy.torch.gather import Gathered, parameters_of
from buoy.torch.probes import Probes

if TYPE_CHECKING:
    from buoy.torch.contract import Contract

__all__ = ["Guide"]

_LOSSES = 4  # first ones whose graphs are looked at
_AGAIN = 2  # and after the 2nd, 4th, 8th ... step: another model may have come


class Guide:
    """Know the order of calls, and what it looks like when it is wrong."""

    def __init__(self) -> None:
        self.fresh = True  # the next loss is to be looked at
        self._looks = _LOSSES
        self._steps = 0
        self._reached: dict[int, weakref.ref[torch.Tensor]] | None = None
        self._met: dict[int, weakref.ref[Any]] = {}
        self._said: set[str] = set()
        self._probes: dict[int, Probes] = {}
        self._model_steps = False  # an optimizer holds parameters of `model`
        self._strangers: set[int] = set()  # ... these hold what looks like them
        self.watching = True  # there is something to compare gradients with
        self._bad: dict[int, list[tuple[Any, Any, int]]] = {}
        self._stale: set[int] = set()
        self.sound: set[int] = set()  # optimizers looked at since their last step

    def say(self, topic: str, message: str) -> None:
        """Warn, once for each topic."""
        if topic not in self._said:
            self._said.add(topic)
            aloud.warn(message, BuoyWarning)

    # -- the first loss ---------------------------------------------------------------

    def first_loss(self, scaler: "Contract", loss: torch.Tensor) -> None:
        """Look at the graph of one of the first: hooks that step, BF16, no graph."""
        if not loss.requires_grad:
            self._no_graph(loss)
            return
        reached, dtypes = holes.leaves(loss)
        if not scaler._strict:
            self._refuse_stepping(scaler, loss, reached)
        self._looks -= 1
        self.fresh = self._looks > 0
        first = not self._reached
        self._reached = self._reached or {}
        self._reached.update((id(param), weakref.ref(param)) for param in reached)
        if first and torch.bfloat16 in dtypes and torch.float16 not in dtypes:
            self.say(
                "bf16",
                "The loss was computed in BF16, which has the range of FP32: its "
                "gradients do not underflow and scaling is not needed. Pass "
                "`enabled=False`, or `policy='none'`, or use torch.float16.",
            )

    def _refuse_stepping(
        self, scaler: "Contract", loss: torch.Tensor, reached: list[torch.Tensor]
    ) -> None:
        """Refuse optimizers in the backward pass, or let the pass be compared."""
        hooked = inside.hooked(reached)
        stepping = inside.stepping(reached)
        if stepping:
            raise words.in_backward(scaler._names.of(None, stepping))
        # Sharded parameters are gathered and freed in the backward pass; and to compare
        # is to wait for a device.
        sharded = dist.is_available() and dist.is_initialized()
        waits = scaler._never_sync and not all(param.is_cpu for param in hooked)
        if hooked and not sharded and not waits:
            inside.compare(
                loss,
                hooked,
                lambda moved: words.in_backward(
                    scaler._names.of(None, moved), put_back=True
                ),
            )

    def _no_graph(self, loss: torch.Tensor) -> None:
        if loss.dim() == 0 and torch.is_grad_enabled() and not self._reached:
            self._reached = {}
            self.say(
                "no graph",
                "The loss does not require grad, so `backward()` cannot reach any "
                "parameter: it was detached, made of `.item()` values, or computed "
                "under torch.no_grad(). Scale the loss that the model returned.",
            )

    # -- looking at gradients ---------------------------------------------------------

    def before_look(self, optimizer: Any) -> None:
        """Compare gradients with those of the last skip, before they are touched."""
        key = id(optimizer)
        for owned, reference, version in self._bad.pop(key, ()):
            owner, grad = owned(), reference()
            # Cleared gradients are other tensors, or were changed at least twice: once
            # by zeroing, once by the backward pass that made them non-finite again.
            kept = grad is not None and owner is not None and owner.grad is grad
            if kept and grad._version - version <= 1:
                self._stale.add(key)
        self._set_watching()

    def _set_watching(self) -> None:
        self.watching = bool(self._bad) or any(p.open for p in self._probes.values())

    def stale(self, optimizer: Any) -> bool:
        """Say whether the gradients of this skip are those of an earlier one."""
        found = id(optimizer) in self._stale
        self._stale.discard(id(optimizer))
        return found

    def remember(self, optimizer: Any, owners: list[torch.Tensor]) -> None:
        """Keep an eye on gradients that made a step fail."""
        held = [
            (weakref.ref(owner), weakref.ref(owner.grad), owner.grad._version)
            for owner in owners[:4]
            if owner.grad is not None
        ]
        self._bad[id(optimizer)] = held
        self._set_watching()

    # -- stepping ---------------------------------------------------------------------

    def before_step(self, scaler: "Contract", optimizer: Any) -> None:
        """Look at an optimizer that has not been seen before."""
        self._steps += 1
        if not self._steps & (self._steps - 1):
            self._looks, self.fresh = max(self._looks, _AGAIN), True
        known = self._met.get(id(optimizer))
        if known is not None and known() is optimizer:
            if self._strangers:
                self._judge_stranger(optimizer)
            return
        held = parameters_of(optimizer)
        stepping = [] if scaler._strict else inside.stepping(held)
        if stepping:
            raise words.in_backward(scaler._names.of(optimizer, stepping))
        self.sound.discard(id(optimizer))
        self._probes.pop(id(optimizer), None)
        self.watching = True
        try:
            self._met[id(optimizer)] = weakref.ref(optimizer)
        except TypeError:  # cannot be referred to: look at it every time
            return
        known_params = scaler._names.known
        if any(id(param) in known_params for param in held):
            self._model_steps = True
        elif known_params and scaler._names.looks_like(held):
            self._strangers.add(id(optimizer))

    def _judge_stranger(self, optimizer: Any) -> None:
        """Warn of one that steps again, if by now none has stepped the model."""
        if self._model_steps:
            self._strangers.clear()
        if id(optimizer) not in self._strangers:
            return
        self._strangers.clear()
        self.say(
            "other model",
            "None of this optimizer's parameters belongs to `model`: the model was "
            "moved, wrapped, or re-created after the optimizer was built, which keeps "
            "stepping the old parameters. Build the optimizer from the model as it is "
            "now.",
        )

    def before_unscale(
        self, scaler: "Contract", optimizer: Any, gathered: Gathered
    ) -> None:
        """Notice gradients that were clipped while they were still scaled."""
        if not gathered.grads:
            return
        probes = self._probes.setdefault(id(optimizer), Probes())
        scale = probes.look(scaler, optimizer, gathered) if probes.open else None
        self._set_watching()
        if scale is None:
            return
        self.say(
            "clipped",
            "Gradients were changed between `backward()` and `step`, while they were "
            f"still multiplied by the scale ({scale:g}), and are now very small: it "
            "looks as if they were clipped, to a threshold that much too low. Use "
            "`scaler.clip_grad_norm_(optimizer, max_norm)`, or call "
            "`scaler.unscale_(optimizer)` before clipping by hand.",
        )

    # -- no gradients -----------------------------------------------------------------

    def why_no_gradients(self, optimizer: Any) -> list[str]:
        """Find out why none of an optimizer's parameters has a gradient."""
        held = parameters_of(optimizer)
        if not any(param.requires_grad for param in held):
            return ["None of them requires grad: unfreeze some, with requires_grad_()."]
        if self._reached is None:
            return []
        if not self._reached:
            return ["The loss had no graph: it was detached or made under no_grad()."]
        reached = {
            id(param) for ref in self._reached.values() if (param := ref()) is not None
        }
        if any(id(param) in reached for param in held):
            cause = (
                "The loss does depend on them: `backward()` was not called on the "
                "scaled loss, or `zero_grad()` was called after it."
            )
            return [cause]
        cause = (
            f"The loss depends on {len(reached)} parameters, and this optimizer holds "
            "none of them: the model was moved, wrapped or re-created after the "
            "optimizer was built, or this is another model's optimizer. Build the "
            "optimizer from the model as it is now."
        )
        return [cause]
