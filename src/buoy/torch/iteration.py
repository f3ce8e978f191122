"""State between two updates: a `Work` per optimizer, and the iteration's losses."""

import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch.amp.grad_scaler import OptState

from buoy._backends import torch as backend
from buoy._backends.torch.gradients import (
    Gathered,
    Survey,
    first_gradient,
    parameters_of,
    recheck,
    same_parameters,
)
from buoy._backends.torch.graph import graph_nodes
from buoy._core.step import MEASUREMENTS
from buoy.torch import errors
from buoy.torch.loss_check import LOSS, LossCheck
from buoy.torch.policy_runner import Evidence

if TYPE_CHECKING:
    from buoy.torch.distributed import Agreed

Flags = dict[torch.device, torch.Tensor]
Measured = dict[str, float | torch.Tensor]
_LOSSES = 64  # of one iteration that are kept, for its verdict
_NOTHING: Measured = {}


class Work(dict[str, Any]):
    """One optimizer's gradients between two updates: inspected, unscaled, applied.

    As a dict it has torch's two keys, `stage` and `found_inf_per_device`, which other
    libraries read and write.  Everything else is an attribute.
    """

    optimizer: Any = None
    gathered: Gathered | None = None  # the gradients that were inspected
    first: tuple[Any, int] | None = None  # `first_gradient`, once unscaled
    survey: Survey | None = None
    multiplier: torch.Tensor | None = None  # unscales and clips; not applied yet
    norm: torch.Tensor | None = None  # unscaled, before clipping
    clipped_norm: torch.Tensor | None = None
    order = 2.0  # of that norm
    clips = False  # the first inspection measured a norm of order 1 or more
    measured: Measured = _NOTHING  # by `Policy.wants`
    amax: float | torch.Tensor | None = None  # the largest scaled magnitude
    policy_flags: Flags | None = None  # what the policy sees; None: the same flags
    found: torch.Tensor | None = None  # the flag that its step used
    finite: bool | None = None  # the outcome, if the host has it
    settle: "Callable[..., Agreed] | None" = None  # combines the findings of all ranks
    differs: torch.Tensor | None = None  # 1 if ranks differ; the host has not read it
    mismatch: Callable[[], Exception] | None = None  # the error, if they do
    freshness: "Freshness | None" = None
    stale = False  # the gradients of an earlier skip were never cleared
    handed = False  # the optimizer divides the gradients itself
    spike: torch.Tensor | None = None
    outcome: Any = None  # a `LastStep`, once it has stepped or was skipped

    def __init__(self) -> None:
        self["stage"], self["found_inf_per_device"] = OptState.READY, {}

    def __missing__(self, key: str) -> Any:
        """Combine the flags of all ranks when they are first read."""
        if self.settle is None:
            raise KeyError(key)
        self.settle()
        return self[key]

    def reset(self) -> None:
        """Clear the findings: the optimizer evaluates its closure again."""
        optimizer = self.optimizer
        vars(self).clear()
        self.optimizer = optimizer
        self.update(stage=OptState.READY, found_inf_per_device={})

    def check(self, method: str, works: Collection["Work"]) -> None:
        """Raise if `method` may not be called now; `works` are those of all optimizers.

        Resets an inspection whose result is not in use.
        """
        stage = self["stage"]
        if stage is OptState.STEPPED:
            late = errors.unscale_after_step(method)
            raise errors.step_twice() if method == "step" else late
        if len(works) > 1 and self._is_alias_in(works):
            raise errors.unscaled_elsewhere()
        if self.freshness is not None:
            if stage is OptState.READY and self.multiplier is None:
                self.freshness = self.survey = None
            elif self.freshness.outdated():
                raise errors.changed(method)
            elif method == "step" and self.freshness.nodes != graph_nodes():
                # A loss that was not scaled may have added to the gradients.
                recheck(self.optimizer, self.get("found_inf_per_device", {}))

    def _is_alias_in(self, works: Collection["Work"]) -> bool:
        """Return whether another optimizer's work has inspected one of its gradients.

        After `zero_grad`, the gradients of a finished step do not count.
        """
        if self.gathered is not None:
            return False
        mine = {id(param.grad) for param in parameters_of(self.optimizer)}
        return any(
            other.gathered is not None
            and not mine.isdisjoint(map(id, other.gathered.held))
            and (other.outcome is None or other.outcome.has_unscaled())
            for other in works
        )

    def first_gradient(self) -> tuple[Any, int] | None:
        """Return a weak reference to one gradient, and its version, to detect edits."""
        params = () if self.gathered is None else self.gathered.params
        found = params[0].grad if params else None
        found = first_gradient(self.optimizer) if found is None else found
        return None if found is None else (weakref.ref(found), found._version)

    def veto(self, flag: torch.Tensor, home: torch.device) -> None:
        """Skip the step for a reason that the policy must not see."""
        flags: Flags = self["found_inf_per_device"]
        found = combined(flags, home)
        if found is None:
            return
        if self.policy_flags is None:
            self.policy_flags = flags
        both = torch.maximum(found, flag.to(home, non_blocking=True))
        self["found_inf_per_device"] = {home: both}


class Freshness:
    """Detects gradients that were computed after an optimizer's were inspected.

    A further backward pass, or a parameter that has a gradient now and had none, is a
    change.  Writing to `.grad` by hand is not.  Hooks on the parameters are registered
    only if another loss is scaled before the step.
    """

    # Class attributes as defaults: one instance is made in every step.
    _handles: Sequence[Any] = ()
    _grads: Sequence[tuple[torch.Tensor, int]] = ()
    touched = False

    def __init__(self, optimizer: Any, gathered: Gathered | None) -> None:
        self._optimizer, self.nodes = optimizer, graph_nodes()
        self._params = None if gathered is None else gathered.params

    def expect_backward(self) -> None:
        """Register hooks that detect a backward pass: another loss was scaled."""
        if self._handles:
            return
        notice: Any = partial(_notice, weakref.ref(self))
        params = parameters_of(self._optimizer)
        self._handles = [
            param.register_post_accumulate_grad_hook(notice)  # type: ignore[no-untyped-call]
            for param in params
            if param.requires_grad and param.is_leaf
        ]
        weakref.finalize(self, _remove, self._handles).atexit = False
        if dist.is_available() and dist.is_initialized():
            # Sharded gradients are assigned without calling hooks.
            self._grads = [(p, id(p.grad)) for p in params if p.grad is not None]

    def outdated(self) -> bool:
        """Return whether there are gradients that were not inspected."""
        if self.touched or any(id(param.grad) != known for param, known in self._grads):
            return True
        known = self._params
        return known is not None and not same_parameters(self._optimizer, known)


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()


def _notice(freshness: "weakref.ref[Freshness]", _: torch.Tensor) -> None:
    held = freshness()
    if held is not None:
        held.touched = True


class Iteration:
    """The losses and counters of a scaler's current iteration."""

    def __init__(self, wants: Collection[str] = ()) -> None:
        self.losses: deque[float | torch.Tensor] = deque(maxlen=_LOSSES)
        self.loss_check = LossCheck() if LOSS in wants else None
        self.scalings = 0  # calls of `scale`
        self.scaled = False  # there was one, in this iteration or before
        self.deferred = False  # `update` was called, and waits: `features.managed`
        self.assumed = False  # the scale was created without a loss on this rank
        self.in_schedule = False  # losses are scaled inside a pipeline's schedule
        self.differs: torch.Tensor | None = None  # ranks differ; not read yet
        # For compiled steps, as tensors: see `features.compiled`.
        self.compiled_losses: tuple[torch.Tensor, ...] = ()
        self.compiled_looks: tuple[Any, ...] = ()
        self.compiled_steps: tuple[Any, ...] = ()

    def forget_losses(self) -> None:
        """Forget the losses, after an update or for a state of another run."""
        self.losses.clear()
        if self.loss_check is not None:
            self.loss_check.clear()


def combined(flags: Flags, home: torch.device) -> torch.Tensor | None:
    """Combine the flags of several devices on one; None if there are none.

    Not their sum: torch's fused kernels skip only where the flag is exactly 1.
    """
    flag = flags.get(home) if len(flags) == 1 else None
    if flag is not None:
        return flag.reshape(()) if flag.dim() else flag  # others use a shape of [1]
    found = [flag.to(home, non_blocking=True).reshape(()) for flag in flags.values()]
    if not found:
        return None
    return found[0] if len(found) == 1 else torch.stack(found).max()


def evidence_of(works: list[Work], home: torch.device) -> Evidence | None:
    """Combine the findings of several optimizers; None if there are none."""
    found: list[Evidence] = []
    for work in works:
        learns = work.policy_flags
        flags = work["found_inf_per_device"] if learns is None else learns
        flag = combined(flags, home)
        if flag is None:
            continue
        finite = work.finite
        if learns is not None or work.outcome is None:  # not read on the host yet
            seen = backend.host_value(flag)
            finite = None if seen is None else not seen
        found.append(Evidence(flag, finite, work.measured))
    if len(found) <= 1:
        return found[0] if found else None
    every, outcomes, measured = zip(*found, strict=True)
    known = None if None in outcomes else all(outcomes)
    return Evidence(torch.stack(every).max(), known, merged(measured, home))


def merged(found: Sequence[Measured], home: torch.device) -> Measured:
    """Combine several measurements of gradients: the largest of each."""
    whole: Measured = {}
    for name in (*MEASUREMENTS, LOSS):
        values = [one[name] for one in found if name in one]
        if values:
            numbers = torch.stack([backend.scalar(value, home) for value in values])
            whole[name] = numbers.max()
    if not all("amax_log2" in one for one in found):
        whole.pop("amax_log2", None)  # that of some optimizers alone
    return whole
