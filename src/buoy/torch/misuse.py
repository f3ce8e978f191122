"""Notice mistakes that would train badly without a word, and name them once.

Everything that costs time is done on the first loss, on an optimizer's first steps, or
after a skip; a correct loop is never told anything.
"""

import weakref
from typing import TYPE_CHECKING, Any

import torch

from buoy._backends import torch as backend
from buoy.torch import aloud, holes, words
from buoy.torch.errors import BuoyWarning
from buoy.torch.gather import Gathered, parameters_of

if TYPE_CHECKING:
    from buoy.torch.contract import Contract

__all__ = ["Guide"]

_PROBES = 3  # first looks at gradients that check who else has touched them
_CLIPPED = 100.0  # a norm of scaled gradients below this is suspiciously small
_HIGH = 2.0**10  # ... at scales from here on


class Guide:
    """Know the order of calls, and what it looks like when it is wrong."""

    def __init__(self) -> None:
        self.fresh = True
        self._reached: list[weakref.ref[torch.Tensor]] | None = None
        self._met: dict[int, weakref.ref[Any]] = {}
        self._said: set[str] = set()
        self._probes = _PROBES
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
        """Look at the graph of the first loss: hooks that step, BF16, no graph."""
        self.fresh = False
        if not loss.requires_grad:
            self._no_graph(loss)
            return
        reached, dtypes = holes.leaves(loss)
        self._reached = [weakref.ref(param) for param in reached]
        stepping = holes.stepping(reached)
        if stepping and not scaler._strict:
            self.fresh = True
            raise words.in_backward(scaler._names.of(None, stepping))
        if torch.bfloat16 in dtypes and torch.float16 not in dtypes:
            self.say(
                "bf16",
                "The loss was computed in BF16, which has the range of FP32: its "
                "gradients do not underflow and scaling is not needed. Pass "
                "`enabled=False`, or `policy='none'`, or use torch.float16.",
            )

    def _no_graph(self, loss: torch.Tensor) -> None:
        self.fresh = True
        if loss.dim() == 0 and torch.is_grad_enabled():
            self._reached = []
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
        self.watching = bool(self._bad) or self._probes > 0

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
        known = self._met.get(id(optimizer))
        if known is not None and known() is optimizer:
            return
        held = parameters_of(optimizer)
        stepping = [] if scaler._strict else holes.stepping(held)
        if stepping:
            raise words.in_backward(scaler._names.of(optimizer, stepping))
        self.sound.discard(id(optimizer))
        try:
            self._met[id(optimizer)] = weakref.ref(optimizer)
        except TypeError:  # cannot be referred to: look at it every time
            return
        self._check_model(scaler, held)

    def _check_model(self, scaler: "Contract", held: list[torch.Tensor]) -> None:
        known = scaler._names.known
        if not known or not held or any(id(param) in known for param in held):
            return
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
        if not self._probes or not gathered.grads or scaler._never_sync:
            return
        self._probes -= 1
        self._set_watching()
        known = scaler._rule.known(scaler)
        if known is None or known < _HIGH or not _touched(scaler, optimizer, gathered):
            return
        if not _clipped(gathered.grads):
            return
        self.say(
            "clipped",
            "Gradients were changed between `backward()` and `step`, while they were "
            f"still multiplied by the scale ({known:g}), and are now very small: it "
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
        reached = {id(param) for ref in self._reached if (param := ref()) is not None}
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


def _touched(scaler: "Contract", optimizer: Any, gathered: Gathered) -> bool:
    """Say whether all gradients are fresh from one backward pass, yet changed."""
    shared = torch.distributed.is_available() and torch.distributed.is_initialized()
    if len(scaler._losses) != 1 or shared:
        return False
    return all(
        grad._version == 1 and grad._base is None for grad in gathered.grads
    ) and not any(
        getattr(owner, "_post_accumulate_grad_hooks", None)
        for owner in parameters_of(optimizer)
    )


def _clipped(grads: list[torch.Tensor]) -> bool:
    """Say whether the norm, or the largest magnitude, is just what one clips to.

    Clipping leaves exactly its threshold, and people choose thresholds of one or two
    digits; what else changes gradients leaves any number.  Reads on the host.
    """
    norms = [torch.linalg.vector_norm(grad.float()) for grad in grads]
    sizes = [torch.linalg.vector_norm(grad.float(), float("inf")) for grad in grads]
    left = backend.read([torch.stack(norms).norm(), torch.stack(sizes).max()])
    return any(
        0.0 < size <= _CLIPPED and abs(size - float(f"{size:.1e}")) <= 2e-5 * size
        for size in left
    )
