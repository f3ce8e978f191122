"""Warn once about mistakes that would otherwise degrade training silently.

Expensive checks run only on the first losses, on an optimizer's first steps, or after a
skip.  A correct loop gets no warning.
"""

import weakref
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from buoy._backends import torch as backend
from buoy._backends.torch.clipped import ClippedWhileScaled
from buoy._backends.torch.gradients import parameters_of
from buoy._backends.torch.graph import graph_of, hooks_of, stepped_in_backward
from buoy._core.errors import BuoyWarning, CallOrderError
from buoy._core.warn import warn
from buoy.torch.hooks import Extension, Scaler
from buoy.torch.pending import Pending
from buoy.torch.scale import CLIPPED, Plan, Scale

__all__ = ["Hints"]

_LOSSES = 4  # the first losses, whose graphs are walked
_MORE_LOSSES = 2  # after the 2nd, 4th, 8th ... step, and a new optimizer's first one


class Hints(Extension):
    """Collects facts about a training loop, and warns about mistakes."""

    key = "hints"

    def __init__(self) -> None:
        self._warned: set[str] = set()
        self._losses_left = _LOSSES
        self._steps = 0
        self._has_graph: bool | None = None  # whether a loss had one; None: no loss yet
        # By id: parameters that losses depend on, and optimizers that have stepped.
        self._reached = weakref.WeakValueDictionary[int, torch.Tensor]()
        self._known: dict[int, weakref.ref[Any]] = {}
        # Optimizers of models with `model`'s shapes; None once `model` has stepped.
        self._lookalikes: set[int] | None = set()
        self._bad: dict[int, list[_Gradient]] = {}  # of each optimizer's last skip
        self._clipping = ClippedWhileScaled()
        self.clipped = False  # gradients are clipped while they are scaled
        self._scale: Scale | None = None  # once there were gradients

    def warn(self, topic: str, message: str) -> None:
        """Warn, once for each topic."""
        if topic not in self._warned:
            self._warned.add(topic)
            warn(message, BuoyWarning)

    def loss_scaled(
        self, scaler: Scaler, loss: torch.Tensor, scaled: torch.Tensor
    ) -> None:
        """Check the graph of the first losses: steps in backward, BF16, no graph."""
        self._clipping.loss_scaled(scaled)
        if self._losses_left <= 0:
            return
        if not loss.requires_grad:
            if loss.dim() == 0 and torch.is_grad_enabled() and not self._has_graph:
                self._has_graph = False
                self.warn("no graph", _NO_GRAPH)
            return
        reached, dtypes = graph_of(loss)
        _refuse_steps_in_backward(scaler, scaled, reached)
        self._losses_left -= 1
        in_bf16 = torch.bfloat16 in dtypes and torch.float16 not in dtypes
        if in_bf16 and not self._has_graph:
            self.warn("bf16", _BF16)
        self._has_graph = True
        self._reached.update((id(param), param) for param in reached)

    def before_inspect(self, scaler: Scaler, pending: Pending) -> None:
        """Check whether gradients were not cleared, or clipped while scaled."""
        if self._bad:
            kept = self._bad.pop(id(pending.optimizer), ())
            pending.stale = any(map(_is_kept, kept))
        if not isinstance(scaler._loss_scale, Plan):
            self._scale = scaler._loss_scale
            self._look_for_clipping(scaler, self._scale, pending.optimizer)
            pending.measured[CLIPPED] = float(self.clipped)

    def _look_for_clipping(self, scaler: Scaler, scale: Scale, optimizer: Any) -> None:
        clipped_at = self._clipping.look(optimizer, scale.tensor)
        if clipped_at is not None:
            self.clipped = True
            self.warn("clipped", _CLIPPED.format(clipped_at))
            if scaler.trace is not None:
                seen = {"step": scale.turn, "scale": clipped_at}
                scaler.trace.describe(clipped_while_scaled=seen)
        elif self.clipped and self._clipping.over:
            self.clipped = False

    def state_dict(self) -> Any:
        """Return what the looks for clipping have found, if the scale depends on it."""
        if self._scale is None or not self._scale.follows_size:
            return None
        looks = self._clipping.state()
        held = self.clipped or backend.read_one(self._scale.clipping) > 0.0
        return {"clipped": held, "looks": looks} if held or looks else None

    def load_state_dict(self, state: Any) -> None:
        """Restore it."""
        if state is None:
            state = {"clipped": False, "looks": []}
        if type(state["clipped"]) is not bool:
            raise TypeError(f"'clipped' is {state['clipped']!r}")
        self._clipping.load(state["looks"])
        self.clipped = state["clipped"]

    def before_step(self, scaler: Scaler, pending: Pending) -> None:
        """Check an optimizer at its first step."""
        self._steps += 1
        if not self._steps & (self._steps - 1):
            self._look_at_more_losses()
        optimizer = pending.optimizer
        known = self._known.get(id(optimizer))
        if known is not None and known() is optimizer:
            if self._lookalikes and id(optimizer) in self._lookalikes:
                self._lookalikes = None
                self.warn("other model", _OTHER_MODEL)
            return
        self._look_at_more_losses()
        held = parameters_of(optimizer)
        if stepping := stepped_in_backward(held):
            raise _in_backward(scaler._names.of(optimizer, stepping))
        with suppress(TypeError):  # no weak references: check at every step
            self._known[id(optimizer)] = weakref.ref(optimizer)
        model = scaler._names.known
        if any(id(param) in model for param in held):
            self._lookalikes = None
        elif self._lookalikes is not None and scaler._names.looks_like(held):
            self._lookalikes.add(id(optimizer))

    def _look_at_more_losses(self) -> None:
        self._losses_left = max(self._losses_left, _MORE_LOSSES)

    def skipped(self, scaler: Scaler, pending: Pending) -> None:  # noqa: ARG002
        """Keep references to the gradients that were not finite."""
        outcome = pending.outcome
        if outcome is not None and outcome.found is not None:
            outcome.stale = pending.stale
            self._bad[id(pending.optimizer)] = [
                _Gradient(weakref.ref(owner), weakref.ref(grad), grad._version)
                for owner in outcome.find_offenders()[:4]
                if (grad := owner.grad) is not None
            ]

    def why_no_gradients(self, optimizer: Any) -> str:
        """Return why no parameter has a gradient; empty if unknown."""
        held = parameters_of(optimizer)
        if not any(param.requires_grad for param in held):
            return "None of them requires grad: unfreeze some, with requires_grad_()."
        if self._has_graph is None:
            return ""
        if not self._has_graph:
            return "The loss had no graph: it was detached or made under no_grad()."
        if any(id(param) in self._reached for param in held):
            return (
                "The loss does depend on them: `backward()` was not called on the "
                "scaled loss, or `zero_grad()` was called after it."
            )
        return (
            "The loss depends on parameters, but the optimizer holds none of them: it "
            "belongs to another model, or the model was moved, wrapped or re-created "
            "after it was built. Build the optimizer from the model as it is now."
        )


_NO_GRAPH = (
    "The loss does not require grad, so `backward()` cannot reach any parameter: it "
    "was detached, made of `.item()` values, or computed under torch.no_grad(). Scale "
    "the loss that the model returned."
)
_BF16 = (
    "The loss was computed in BF16, which has the range of FP32: scaling is not "
    "needed. Pass `enabled=False` or `policy='none'`, or use torch.float16."
)
_OTHER_MODEL = (
    "None of this optimizer's parameters belongs to `model`: the model was moved, "
    "wrapped, or re-created after the optimizer was built, which keeps stepping the "
    "old parameters. Build the optimizer from the model as it is now."
)
_CLIPPED = (
    "Gradients changed between `backward()` and `step`, while they were still "
    "multiplied by the scale. It looks as if they were clipped, with a threshold that "
    "is {:g} times too low. Use `scaler.clip_grad_norm_(optimizer, max_norm)`, or call "
    "`scaler.unscale_(optimizer)` before clipping by hand."
)


class _Gradient(NamedTuple):
    """A non-finite gradient and its `_version`."""

    owner: weakref.ref[torch.Tensor]
    grad: weakref.ref[torch.Tensor]
    version: int


def _is_kept(bad: _Gradient) -> bool:
    """Return whether a gradient was not cleared since.

    Cleared gradients are other tensors, or were written at least twice: by `zero_grad`
    and by the next backward pass.
    """
    owner = bad.owner()
    grad = bad.grad()
    if owner is None or grad is None or owner.grad is not grad:
        return False
    return grad._version - bad.version <= 1


# -- optimizers that step inside the backward pass -------------------------------------


def _refuse_steps_in_backward(
    scaler: Scaler, scaled: torch.Tensor, reached: list[torch.Tensor]
) -> None:
    """Raise for optimizers that step inside the backward pass.

    They use gradients multiplied by the scale, and an overflow found later in the same
    pass would leave some parameters updated and others not.  Parameters that torch
    marks, or whose hook is a bound `step`, raise before the pass.  For other hooks the
    parameters are compared after the pass, and restored if they changed.
    """
    names = scaler._names
    if stepping := stepped_in_backward(reached):
        raise _in_backward(names.of(None, stepping))
    hooked = [param for param in reached if any(map(_is_foreign, hooks_of(param)))]
    # Sharded parameters are gathered and freed in the backward pass, and comparing
    # waits for the device.
    may_read = scaler._options.sync != "never" or all(p.is_cpu for p in hooked)
    ranks = dist.is_available() and dist.is_initialized()
    if not hooked or ranks or not may_read:
        return

    def begin(_: torch.Tensor) -> None:
        held = [(param, param.detach().clone()) for param in hooked]
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(partial(_refuse_changed, held, names))

    scaled.register_hook(begin)  # type: ignore[no-untyped-call]


def _is_foreign(hook: Any) -> bool:
    """Return whether a hook is not one of this package."""
    return not str(getattr(hook, "__module__", "")).startswith("buoy.")


def _kind(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.device, tensor.dtype, tensor.shape


@torch.no_grad()
def _refuse_changed(held: list[tuple[torch.Tensor, torch.Tensor]], names: Any) -> None:
    changed = [
        (param, copy)
        for param, copy in held
        if _kind(param) == _kind(copy)  # one that was moved cannot be compared
        and not torch.allclose(param, copy, rtol=0.0, atol=0.0, equal_nan=True)
    ]
    for param, copy in changed:
        param.copy_(copy)
    if changed:
        found = [param for param, _ in changed]
        raise _in_backward(names.of(None, found), restored=True)


def _in_backward(names: tuple[str, ...], *, restored: bool = False) -> CallOrderError:
    shown = ", ".join(f"`{name}`" for name in names[:3]) or "a parameter"
    seen = f"{shown} has a post-accumulate-grad hook that updates it"
    if restored:
        seen = f"a hook changed {shown}. The weights were restored, other state was not"
    return CallOrderError(
        f"An optimizer steps inside the backward pass: {seen}. It sees gradients "
        "multiplied by the scale, and an overflow found later in the same pass would "
        "leave some parameters updated and others not. Remove the hooks and call "
        "`scaler.step(optimizer)` after `backward()`; or keep them and train in BF16 "
        "or FP32 without a scaler (`enabled=False`)."
    )
