"""The outcome of a step; the host waits for the device only when a field is read."""

import weakref
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any, NamedTuple

import torch

from buoy._backends import torch as backend
from buoy._backends.torch.gradients import first_gradient, gather
from buoy._backends.torch.names import Names
from buoy._backends.torch.poison import nonfinite_parameters, poisoned
from buoy._core.step import Row
from buoy._core.verdicts import Verdict, judge_losses
from buoy.torch.freshness import FirstGradient
from buoy.torch.scale import Number

__all__ = ["Clues", "LastStep", "weak_reference"]


class Clues(NamedTuple):
    """What the verdict and the offenders of a step are computed from, when read."""

    optimizer: Callable[[], Any]  # a weak reference
    names: Names
    losses: tuple[Number, ...] = ()  # of this iteration
    history: Sequence[Number] = ()  # of earlier ones
    params: tuple["weakref.ref[torch.Tensor]", ...] = ()
    norms: Sequence[torch.Tensor] = ()  # of the gradient of each
    first: FirstGradient | None = None  # notices edits of the gradients
    spike: torch.Tensor | None = None  # float32 []: 1 if the spike guard has acted


class LastStep:
    """One optimizer's last step; only reading a field waits for the device.

    `step`, `applied`, `verdict`, `scale`, `next_scale`, `norm` and `offenders` are as
    in `buoy.Row`; `read()` returns that record, with every number on the host.  `found`
    stays on the device: 1.0 if the step was skipped, for code that must not wait.

    Example:
        >>> import buoy.torch
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> scaler = buoy.torch.GradScaler("cpu", init_scale=4.0)
        >>> scaler.scale(weight.sum()).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> scaler.last_step.applied, scaler.last_step.scale
        (True, 4.0)
    """

    def __init__(
        self,
        clues: Clues,
        *,
        step: int,
        found: torch.Tensor | None,
        applied: bool | None,
        scale: Number,
        norm: Number | None = None,
        next_scale: Number | None = None,
        verdict: Verdict | None = None,
    ) -> None:
        self._clues = clues
        self.step = step  # updates before it
        self.found = found
        self.applied_if_known = applied  # None: the host has not read it
        self.noted_scale = scale  # `scale`, not read yet
        self._norm = norm
        self._next_scale = next_scale
        self._verdict = verdict
        self._offenders: tuple[str, ...] | None = None
        self._groups: tuple[int, ...] = ()
        self.stale = False  # the gradients of an earlier skip were never cleared
        self.partner = False  # skipped because another optimizer's step was

    @property
    def applied(self) -> bool:
        """Whether the weights were updated."""
        if self.applied_if_known is None:
            self.applied_if_known = self.found is not None and not self.found.item()
        return self.applied_if_known

    @property
    def skipped(self) -> bool:
        """Whether the weights were not updated."""
        return not self.applied

    @property
    def scale(self) -> float:
        """The scale that this step's loss was multiplied by."""
        return backend.read_one(self.noted_scale)

    @property
    def next_scale(self) -> float | None:
        """The scale that `update` set; None before it."""
        return None if self._next_scale is None else backend.read_one(self._next_scale)

    @property
    def norm(self) -> float | None:
        """The unscaled norm, before clipping; inf or NaN when skipped.

        None if nothing measured it: clip with `scaler.clip_grad_norm_`, with
        `max_norm=float("inf")` to measure only.
        """
        return None if self._norm is None else backend.read_one(self._norm)

    @property
    def verdict(self) -> Verdict:
        """The reason for a skip, or `applied`.

        Steps that the spike guard clipped have the verdict `spike`, too.
        """
        if self._verdict is None:
            self._verdict = self._judge()
        return self._verdict

    @property
    def offenders(self) -> tuple[str, ...]:
        """Names of the parameters whose gradients were not finite."""
        if self._offenders is None and self.skipped:
            self.find_offenders()
        return self._offenders or ()

    @property
    def groups(self) -> tuple[int, ...]:
        """Indices of the optimizer's parameter groups that contain offenders."""
        _ = self.offenders
        return self._groups

    def read(self) -> Row:
        """Read all fields; this waits for the device once per field."""
        return Row(
            step=self.step,
            applied=self.applied,
            scale=self.scale,
            next_scale=self.next_scale,
            verdict=self.verdict,
            norm=self.norm,
            offenders=self.offenders,
        )

    def __repr__(self) -> str:
        return repr(self.read())

    # -- for the rest of the package ---------------------------------------------------

    @property
    def optimizer(self) -> Any:
        """The optimizer; None once it is deleted."""
        return self._clues.optimizer()

    @property
    def clues(self) -> Clues:
        """What the reason for a skip is found from."""
        return self._clues

    def complete(self, next_scale: Number) -> None:
        """Add the scale that `update` has set."""
        self._next_scale = next_scale

    def skip_with_others(
        self, found: torch.Tensor, cause: "LastStep | None" = None, *, known: bool
    ) -> None:
        """Replace the outcome by the joint one of several optimizers.

        `cause` is the step that failed, if this one did not.
        """
        self.found = found
        self.applied_if_known = False if known else None
        self._verdict = None
        if cause is not None:
            self._verdict = cause.verdict
            self._offenders = cause.offenders
            self.partner = True

    def find_offenders(self) -> list[torch.Tensor]:
        """Find the parameters whose gradients were not finite.  Reads on the host."""
        optimizer = self.optimizer
        if optimizer is None:
            return []
        found = self._nonfinite(optimizer)
        ids = set(map(id, found))
        self._offenders = self._clues.names.of(optimizer, found)
        self._groups = tuple(
            index
            for index, group in enumerate(optimizer.param_groups)
            if any(id(param) in ids for param in group["params"])
        )
        return found

    def is_unchanged(self) -> bool:
        """Return whether `.grad` still holds the gradients of this step, not edited."""
        optimizer = self.optimizer
        if optimizer is None or self._clues.first is None:
            return False
        known, version = self._clues.first
        now = first_gradient(optimizer)
        return now is not None and now is known() and now._version == version

    def _nonfinite(self, optimizer: Any) -> list[torch.Tensor]:
        """List the non-finite parameters, from the norms if any, else from `.grad`."""
        now = nonfinite_parameters(gather(optimizer)) if self.is_unchanged() else []
        sizes = backend.read(self._clues.norms)
        pairs = zip(self._clues.params, sizes, strict=True)
        found = [
            param
            for reference, size in pairs
            if not isfinite(size) and (param := reference()) is not None
        ]
        # A norm can overflow over finite gradients: prefer the gradients if they exist.
        kept = [param for param in found if any(param is other for other in now)]
        return kept or found or now

    def _judge(self) -> Verdict:
        """Return the reason for a skip.  Reads on the host."""
        clues = self._clues
        if clues.spike is not None and clues.spike.item():
            return Verdict.SPIKE
        if self.applied:
            return Verdict.APPLIED
        if self.stale:
            return Verdict.STALE_GRADS
        optimizer = self.optimizer
        if optimizer is not None and poisoned(optimizer):
            return Verdict.POISONED
        return judge_losses(backend.read(clues.losses), backend.read(clues.history))


def weak_reference(optimizer: Any) -> Callable[[], Any]:
    """Return a weak reference, or a strong one to an object that allows none."""
    try:
        return weakref.ref(optimizer)
    except TypeError:
        return lambda: optimizer
