"""What became of a step, readable without stopping the device until someone looks."""

import weakref
from typing import TYPE_CHECKING, Any

import torch

from buoy._core.state import Step, Verdict
from buoy.torch import verdicts
from buoy.torch.takers import unscales_in_place

if TYPE_CHECKING:
    from buoy.torch.fingerprint import Mark
    from buoy.torch.report import Reporting

__all__ = ["LastStep"]

Number = float | torch.Tensor
# The parameters that a survey looked at, and the norm of each one's gradient.
Parts = tuple[list[weakref.ref[torch.Tensor]], tuple[torch.Tensor, ...] | torch.Tensor]


class LastStep:
    """One optimizer's last step: reading a field is the only thing that waits.

    `applied`, `verdict`, `scale`, `next_scale`, `norm` and `offenders` are as in
    `buoy.Step`; `read()` gives that record, with every number on the host.  `found`
    stays on the device: 1.0 where the step was skipped, for code that must not wait.

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

    # Set where there is something to say: one of these is made in every step.
    found: torch.Tensor | None
    stale = False
    partner = False  # skipped because of another one of a joint iteration
    _next: Number | None = None
    _applied: bool | None = None
    _verdict: Verdict | None = None
    _norm: Number | None = None
    _parts: Parts | None = None
    _offenders: tuple[str, ...] | None = None
    _groups: tuple[int, ...] | None = None
    _losses: "tuple[Number, ...]" = ()
    _mark: "Mark" = []  # noqa: RUF012 - the first gradient, as the step left it
    _spike: torch.Tensor | None = None
    _handed = False  # the gradients were left to the optimizer to unscale

    def __init__(
        self,
        scaler: "Reporting",
        optimizer: Any,
        found: torch.Tensor | None,
        scale: Number,
    ) -> None:
        self._scaler = weakref.ref(scaler)
        self._optimizer = _reference(optimizer)
        self.found = found
        self._scale = scale

    @property
    def applied(self) -> bool:
        """Whether the weights were updated."""
        if self._applied is None:
            self._applied = self.found is None or not self.found.item()
        return self._applied

    @property
    def skipped(self) -> bool:
        """Whether the weights were left alone."""
        return not self.applied

    @property
    def scale(self) -> float:
        """The scale that this step's loss was multiplied by."""
        return _number(self._scale)

    @property
    def next_scale(self) -> float | None:
        """The scale that `update` set; None before it."""
        return None if self._next is None else _number(self._next)

    @property
    def norm(self) -> float | None:
        """The unscaled norm, before clipping; inf or NaN when skipped.

        None if nothing measured it and the gradients have been cleared since.
        """
        if self._norm is None:
            self._norm = self._measured()
        return None if self._norm is None else _number(self._norm)

    @property
    def verdict(self) -> Verdict:
        """Why the step was skipped, or that it was applied.

        `spike` is said of steps that the spike guard clipped, too.
        """
        if self._verdict is None:
            if self._spike is not None and self._spike.item():
                self._verdict = Verdict.SPIKE
            elif self.applied:
                self._verdict = Verdict.APPLIED
            else:
                self._verdict = self._judged()
        return self._verdict

    def _judged(self) -> Verdict:
        scaler = self._scaler()
        if scaler is not None:
            return scaler._judge(self)
        # Gone, and with it the losses of earlier steps; the rest is here.
        return verdicts.judge(self._optimizer(), self._losses, (), stale=self.stale)

    @property
    def offenders(self) -> tuple[str, ...]:
        """Names of the parameters whose gradients were not finite."""
        if self._offenders is None:
            scaler, optimizer = self._scaler(), self._optimizer()
            if self.applied or scaler is None or optimizer is None:
                self._offenders = ()
            else:
                self._offenders = scaler._offenders_of(optimizer, self)
        return self._offenders

    @property
    def groups(self) -> tuple[int, ...]:
        """Indices of the optimizer's parameter groups that the offenders are in."""
        if self._groups is None:
            _ = self.offenders
        return self._groups or ()

    def judged(self, verdict: Verdict) -> None:
        """Set the verdict, where it is known without looking."""
        self._verdict = verdict

    def read(self) -> Step:
        """Read everything; this waits for the device once per field."""
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

    def multiplied_by(self) -> float | None:
        """Tell what the gradients in `.grad` are still multiplied by; None: unknown.

        Torch's kernels leave unscaled ones behind if they step, and else what was
        there; of other optimizers that divide by themselves nobody knows.
        """
        if not self._handed:
            return 1.0
        optimizer = self._optimizer()
        if optimizer is None or not unscales_in_place(optimizer):
            return None
        return 1.0 if self.applied else self.scale

    def _measured(self) -> Number | None:
        scaler, optimizer = self._scaler(), self._optimizer()
        if scaler is None or optimizer is None:
            return None
        return scaler._norm_of(optimizer, self)


def _number(value: Number) -> float:
    return float(value.item()) if isinstance(value, torch.Tensor) else value


def _reference(thing: Any) -> Any:
    try:
        return weakref.ref(thing)
    except TypeError:
        return lambda: thing
