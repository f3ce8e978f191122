"""The outcome of a step; the host waits for the device only when a field is read."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import torch

from buoy._backends import torch as backend
from buoy._backends.torch.gradients import first_gradient, gather, take_survey
from buoy._backends.torch.names import Names
from buoy._backends.torch.poison import nonfinite_parameters, poisoned
from buoy._core.state import Step
from buoy._core.verdicts import Verdict, judge_losses
from buoy.torch.distributed import Agreement
from buoy.torch.iteration import Work
from buoy.torch.optimizers import unscales_in_place

__all__ = ["Context", "LastStep"]

Number = float | torch.Tensor


@dataclass
class Context:
    """What the verdicts of one scaler's steps depend on."""

    names: Names
    history: Sequence[Number]  # the losses of earlier steps
    agreement: Agreement  # other ranks may hold parts of the gradients
    examined: set[int] = field(default_factory=set)  # optimizers with finite weights


class LastStep:
    """One optimizer's last step; only reading a field waits for the device.

    `applied`, `verdict`, `scale`, `next_scale`, `norm` and `offenders` are as in
    `buoy.Step`; `read()` returns that record, with every number on the host.  `found`
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

    # Class attributes as defaults: one instance is made in every step.
    found: torch.Tensor | None
    stale = False  # the gradients of an earlier skip were never cleared
    partner = False  # skipped because another optimizer's step was
    _next: Number | None = None
    _verdict: Verdict | None = None
    _offenders: tuple[str, ...] | None = None
    _groups: tuple[int, ...] | None = None
    _losses: tuple[Number, ...] = ()
    _handed_found: torch.Tensor | None = None  # the `found_inf` of its optimizer

    def __init__(
        self,
        context: Context,
        work: Work,
        found: torch.Tensor | None,
        scale: Number,
        losses: Sequence[Number] = (),
    ) -> None:
        self._context = context
        try:
            self._optimizer: Callable[[], Any] = weakref.ref(work.optimizer)
        except TypeError:  # no weak reference to it
            held = work.optimizer
            self._optimizer = lambda: held
        self.found = found
        self._applied = work.finite if found is not None else False
        self._scale = scale
        self._norm: Number | None = work.norm
        self._handed, self._spike = work.handed, work.spike
        self._parts = None
        survey, gathered = work.survey, work.gathered
        if not work.finite and survey is not None and gathered and len(survey.parts):
            self._parts = [*map(weakref.ref, gathered.params)], survey.parts
        if losses:
            self._losses = tuple(losses)
        self._first = work.first or work.first_gradient()

    @property
    def applied(self) -> bool:
        """Whether the weights were updated."""
        if self._applied is None:
            self._applied = not self.found.item()  # type: ignore[union-attr]
        return self._applied

    @property
    def skipped(self) -> bool:
        """Whether the weights were not updated."""
        return not self.applied

    @property
    def scale(self) -> float:
        """The scale that this step's loss was multiplied by."""
        return backend.read_one(self._scale)

    @property
    def next_scale(self) -> float | None:
        """The scale that `update` set; None before it."""
        return None if self._next is None else backend.read_one(self._next)

    @property
    def norm(self) -> float | None:
        """The unscaled norm, before clipping; inf or NaN when skipped.

        None if nothing measured it and the gradients were edited after `unscale_`,
        for example by torch's own clipping, or cleared since.
        """
        if self._norm is None:
            self._norm = self._measure_norm()
        return None if self._norm is None else backend.read_one(self._norm)

    @property
    def verdict(self) -> Verdict:
        """The reason for a skip, or `applied`.

        Steps that the spike guard clipped have the verdict `spike`, too.
        """
        if self._verdict is None:
            if self._spike is not None and self._spike.item():
                self._verdict = Verdict.SPIKE
            elif self.applied:
                self._verdict = Verdict.APPLIED
            else:
                self._verdict = self._judge()
        return self._verdict

    @property
    def offenders(self) -> tuple[str, ...]:
        """Names of the parameters whose gradients were not finite."""
        unknown = self._offenders is None and self.skipped
        if unknown and (self._parts or self.is_unchanged()):  # not of a later step
            self.find_offenders()
        return self._offenders or ()

    @property
    def groups(self) -> tuple[int, ...]:
        """Indices of the optimizer's parameter groups that contain offenders."""
        if self._groups is None:
            _ = self.offenders
        return self._groups or ()

    def read(self) -> Step:
        """Read all fields; this waits for the device once per field."""
        return Step(
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
        return self._optimizer()

    def judged(self, verdict: Verdict) -> None:
        """Set a verdict that needs no examination."""
        self._verdict = verdict

    def find_offenders(self) -> list[torch.Tensor]:
        """Find the parameters whose gradients were not finite.  Reads on the host."""
        optimizer = self._optimizer()
        if optimizer is None:
            return []
        found = self._nonfinite(optimizer)
        self._offenders = self._context.names.of(optimizer, found)
        ids = set(map(id, found))
        self._groups = tuple(
            index
            for index, group in enumerate(optimizer.param_groups)
            if any(id(param) in ids for param in group["params"])
        )
        return found

    def multiplied_by(self) -> float | None:
        """Return the factor that the gradients in `.grad` still have; None: unknown.

        Torch's fused kernels leave unscaled gradients if they step, and do not change
        them if they skip.  For other optimizers that unscale themselves it is unknown.
        """
        if not self._handed:
            return 1.0
        optimizer = self._optimizer()
        if optimizer is None or not unscales_in_place(optimizer):
            return None
        if self._handed_found is not None:  # undone later, by `skip="joint"`
            return self.scale if self._handed_found.item() else 1.0
        return 1.0 if self.applied else self.scale

    def skip_with_others(self, found: torch.Tensor, *, applied: bool | None) -> None:
        """Replace the outcome by the joint one of several optimizers."""
        self._handed_found, self.found = self.found, found
        self._applied, self._verdict = applied, None

    def is_unchanged(self) -> bool:
        """Return whether `.grad` still holds the gradients of this step, not edited."""
        optimizer = self._optimizer()
        if optimizer is None or self._first is None:
            return False
        known, version = self._first
        now = first_gradient(optimizer)
        return now is not None and now is known() and now._version == version

    def has_unscaled(self) -> bool:
        """Return whether `.grad` may hold this step's gradients, already divided."""
        kept = self._handed and not unscales_in_place(self._optimizer())
        return not kept and self.is_unchanged()

    def _nonfinite(self, optimizer: Any) -> list[torch.Tensor]:
        """List the non-finite parameters, from the norms if any, else from `.grad`."""
        now = nonfinite_parameters(gather(optimizer)) if self.is_unchanged() else []
        if self._parts is None:
            return now
        params, norms = self._parts
        sizes = backend.read(list(norms))
        found = [
            param
            for reference, size in zip(params, sizes, strict=True)
            if not isfinite(size) and (param := reference()) is not None
        ]
        # A norm can overflow over finite gradients: prefer the gradients if they exist.
        kept = [param for param in found if any(param is other for other in now)]
        return kept or found

    def _measure_norm(self) -> Number | None:
        """Measure the norm of this step's gradients, if `.grad` still holds them."""
        if self._context.agreement.active or not self.is_unchanged():
            return None  # one rank alone cannot measure the global norm
        with torch.no_grad():
            gathered = gather(self._optimizer())
            if not gathered.grads:
                return None
            home = gathered.grads[0].device
            one = torch.ones((), dtype=torch.float32, device=home)
            norm = take_survey(gathered, one, order=2.0).norm
        times = self.multiplied_by()
        if norm is None or times is None:
            # The factor is unknown, but inf stays inf whatever the factor.
            return norm if norm is not None and not isfinite(norm.item()) else None
        return norm / times

    def _judge(self) -> Verdict:
        """Return the reason for a skip.  Reads on the host."""
        if self.stale:
            return Verdict.STALE_GRADS
        optimizer, examined = self._optimizer(), self._context.examined
        if optimizer is not None and id(optimizer) not in examined:
            if poisoned(optimizer):
                return Verdict.POISONED
            examined.add(id(optimizer))
        losses, history = list(self._losses), list(self._context.history)
        return judge_losses(backend.read(losses), backend.read(history))
