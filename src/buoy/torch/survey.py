"""Inspect one optimizer's gradients: check, norm, agreement of ranks, clipping.

A `Surveyor` gathers the gradients, reads them once, and combines the findings of all
ranks.  It keeps one multiplier, which unscales and clips, until the multiplier is
applied to `.grad` or passed to the optimizer.

    clip -> norm -> survey_norm -> gather, inspect      first norm, of scaled gradients
                                -> agree, settle         one all-reduce of the findings
                 -> _remeasure_norm                      a further norm of another order
         -> write                                        unless the optimizer unscales
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from buoy._backends import torch as backend
from buoy._backends.torch.gradients import (
    Gathered,
    gather,
    gather_summed,
    magnitudes,
    multiply_,
    parameters_of,
    take_survey,
)
from buoy._backends.torch.measure import MEASURE, clip_factor_of
from buoy._backends.torch.names import Names
from buoy._backends.torch.rank_norms import RankGradients
from buoy._core.errors import OptionError
from buoy._core.step import schedule
from buoy._core.watch import Watch
from buoy.torch import errors
from buoy.torch.distributed import Agreed, Agreement, Findings
from buoy.torch.hooks import Hooks
from buoy.torch.iteration import Flags, Freshness, Iteration, Work, combined
from buoy.torch.loss_check import LOSS, NO_LOSS
from buoy.torch.optimizers import unscales
from buoy.torch.policy_runner import SMALLEST
from buoy.torch.scale import Scale

__all__ = ["Surveyor"]

_SELDOM = 256  # steps between two looks for gradients that are all zero


@dataclass
class Surveyor:
    """Inspects gradients for one scaler; holds its parts, not the scaler itself."""

    scale: Scale
    agreement: Agreement
    names: Names
    hooks: Hooks
    iteration: Iteration
    fp16: Any  # `features.masters.Fp16Parameters`
    watch: Watch

    # -- inspecting --------------------------------------------------------------------

    def gather(self, work: Work, *, allow_fp16: bool) -> Gathered:
        """Collect the gradients that are about to be inspected."""
        self.fp16.prepare(work.optimizer, self.names)
        for hook in self.hooks.before_look:
            hook(work)
        check, tensor = self.iteration.loss_check, self.scale.tensor
        work.measured = {}
        if check is not None and tensor is not None:
            work.measured[LOSS] = check.number(tensor.device)
        gathered = work.gathered = gather(work.optimizer)
        if not (gathered.plain or gathered.distinct):
            raise errors.shared_gradient(self.names.of(work.optimizer, gathered.params))
        apart = gathered.grads is not gathered.held  # torch.distributed is in use
        if apart and gathered.sharded and not self.agreement.active:
            raise OptionError(errors.ALONE_WITH_SHARDS)
        work.freshness = Freshness(work.optimizer, gathered)
        if not gathered.plain and gathered.half:
            self.fp16.check(work.optimizer, self.names, allow=allow_fp16)
        return gathered

    def inspect(self, work: Work, inverse: torch.Tensor, order: float | None) -> None:
        """Check gathered gradients, compute a norm, measure what the policy wants."""
        gathered: Any = work.gathered
        due = self._due(work) if self.scale.wants else ()
        if order is None and self.zeros_due():
            due = {*due, "amax_log2"}
        work.survey = survey = take_survey(
            gathered if order is None else magnitudes(gathered, order),
            inverse,
            order=order,
            amax="amax_log2" in due,
            safe=self.scale.is_safe(inverse),
        )
        work.amax = survey.amax
        if gathered.grads and due:
            amax: Any = survey.amax
            work.measured = work.measured | {
                name: MEASURE[name](gathered.buckets, inverse.device)
                if name in MEASURE
                else amax.float()
                for name in due
            }
        for hook in self.hooks.looked:
            hook(work)

    def zeros_due(self) -> bool:
        """Return whether to check for gradients that are all zero.

        At steps 16, 32, 64, ... and at every 256th; once zeros were found, at every
        step.  Not with several ranks: the part of one rank may be zero.
        """
        steps = self.scale.turn + 1
        due = self.watch.found_zeros or steps % _SELDOM == 0
        due = due or (steps & (steps - 1) == 0 and steps > 8)
        return due and not self.agreement.active

    def _due(self, work: Work) -> Collection[str]:
        """Return the names of the measurements that are due in this iteration."""
        wanted = schedule(self.scale.wants, clips=work.clips)
        return [name for name, one in wanted.items() if one.due(self.scale.turn)]

    def check(self, work: Work) -> Flags:
        """Check without writing, for optimizers that unscale themselves."""
        with torch.no_grad():
            gathered = self.gather(work, allow_fp16=True)
            self.inspect(work, self.scale.now().inverse, None)
        survey: Any = work.survey
        return {survey.found.device: survey.found} if gathered.grads else {}

    # -- ranks -------------------------------------------------------------------------

    def introduce(self) -> None:
        """Compare this scaler with those of the other ranks, once."""
        if self.agreement.active:
            free = not self.iteration.in_schedule  # where a rank waits for its stage
            foresees = free and "loss" in self.scale.wants
            self.agreement.introduce(foresees=foresees, wait=free)

    def agree(self, work: Work, flags: Flags) -> None:
        """Store this rank's findings.

        With several ranks, they are combined when the flags are first read: by then it
        is known whether this rank clips, and ranks that do not all do so get an error
        before any of them steps.
        """
        work["found_inf_per_device"] = flags
        if self.agreement.active:
            self.foresee(None)
            work.settle = partial(self._combine, work, flags)
            del work["found_inf_per_device"]  # see `Work.__missing__`

    def _combine(
        self, work: Work, flags: Flags, norm: Any = None, doing: str | None = None
    ) -> Agreed:
        """Replace this rank's findings by those of all ranks."""
        now, tracker = self.scale.now(), self.scale.tracker
        home = now.device
        flag = combined(flags, home)
        zero = torch.zeros((), dtype=torch.float32, device=home)
        found, due = work.measured, self._due(work)
        measured = {n: backend.scalar(found.get(n, zero), home) for n in due}
        if self.iteration.loss_check is not None:
            measured[LOSS] = backend.scalar(found.get(LOSS, NO_LOSS), home)
        findings = Findings(
            found=zero if flag is None else flag,
            measured=measured,
            scale=now.tensor,
            tracker=zero if tracker is None else tracker,
            turn=self.scale.turn,
            has_grads=flag is not None,
            has_loss=not self.iteration.assumed,
            clipped=self.scale.clipped,
            norm=norm,
        )
        agreed = self.agreement.agree(findings, doing=doing)
        self.scale.clipped_anywhere = agreed.clipped
        if agreed.differs is not None:
            self.iteration.differs = work.differs = agreed.differs
            work.mismatch = agreed.mismatch
        if not agreed.has_loss:
            raise errors.before_scale("step")
        shared = {agreed.found.device: agreed.found} if agreed.has_grads else {}
        work.settle, work["found_inf_per_device"] = None, shared
        work.measured = dict(agreed.measured)
        work.amax = work.measured.get("amax_log2", work.amax)
        return agreed

    def settle(self, work: Work) -> None:
        """Combine the findings of all ranks."""
        if work.settle is not None:
            work.settle()

    def foresee(self, loss: torch.Tensor | None) -> None:
        """Pass this iteration's first loss, the largest of all ranks, to the policy."""
        scale, shared = self.scale, self.agreement.active
        wanted = "loss" in scale.wants or (scale.fp16_loss and not shared)
        if scale.foreseen or not wanted:
            return
        if shared:
            if self.iteration.in_schedule:
                return  # other stages would not join this all-reduce
            loss = self._largest_loss(loss)
        if loss is not None:
            scale.foresee(loss)

    def _largest_loss(self, loss: torch.Tensor | None) -> torch.Tensor | None:
        """Return the largest |loss| of all ranks; ranks without a loss join, too.

        They also learn whether a loss is FP16, where the host can read it.
        """
        scale = self.scale
        own = torch.tensor([-1.0, scale.fp16_loss], dtype=torch.float32, device="cpu")
        own = own.to(scale.now().device, non_blocking=True)
        if loss is not None:
            own[0] = loss.detach().reshape(()).float().abs()
        agreed, half = self.agreement.largest(own, "loss").unbind()
        scale.foreseen = True
        if not backend.in_host_memory(agreed):
            return agreed.abs()
        scale.fp16_loss = backend.read_host_memory(half) > 0
        return agreed.abs() if backend.read_host_memory(agreed) >= 0 else None

    # -- clipping ----------------------------------------------------------------------

    def norm(self, work: Work, order: float) -> torch.Tensor | None:
        """Return the unscaled norm, as clipped so far; measure again only if needed."""
        if work["stage"] is OptState.UNSCALED:
            now = backend.narrowed(self._remeasure_norm(work, order))
            work.norm = now if work.norm is None else work.norm
            return now
        if work.multiplier is None:
            self.survey_norm(work, order)
        norm = work.norm if work.clipped_norm is None else work.clipped_norm
        if work.order == order or work.multiplier is None:
            return norm
        work.order = order
        scaled = self._remeasure_norm(work, order)
        if order:  # 0: a count
            scaled = scaled * work.multiplier
        return backend.narrowed(scaled)

    def survey_norm(self, work: Work, order: float) -> None:
        """Inspect the scaled gradients once; store norm, flag and multiplier."""
        now = self.scale.now()
        gathered = self.gather(work, allow_fp16=unscales(work.optimizer))
        if not gathered.plain:
            gathered = work.gathered = gather_summed(work.optimizer)
        if not (gathered.grads or self.agreement.active):
            return
        work.clips = order >= 1.0
        self.inspect(work, now.inverse, order)
        survey: Any = work.survey
        flags = {now.device: survey.found} if gathered.grads else {}
        norm, work["found_inf_per_device"] = survey.norm, flags
        if self.agreement.active:
            shared = self._shared_norm(work.optimizer, gathered, survey, order)
            self.foresee(None)
            norm = self._combine(work, flags, shared).norm
            self.settle(work)
        work.order, work.multiplier = order, now.inverse
        if work["found_inf_per_device"]:
            work.norm = norm = norm * now.inverse if order else norm  # 0: a count
            if norm.dtype is torch.float64:
                work.norm = backend.narrowed(norm)
        for hook in self.hooks.norm_taken:
            hook(work)

    def _remeasure_norm(self, work: Work, order: float) -> Any:
        """Compute another norm of gradients that were inspected before."""
        gathered = work.gathered = gather_summed(work.optimizer)
        one = torch.ones((), dtype=torch.float32, device=self.scale.now().device)
        survey = take_survey(magnitudes(gathered, order), one, order=order)
        if not self.agreement.active:
            return survey.norm
        norm = self._shared_norm(work.optimizer, gathered, survey, order)
        doing = "largest" if order == math.inf else "norm"
        if work.settle is not None:  # not combined since `unscale_`
            return work.settle(norm=norm, doing=doing).norm
        flags: Flags = work["found_inf_per_device"]
        return self._combine(work, flags, norm, doing).norm

    def _shared_norm(
        self, optimizer: Any, gathered: Gathered, survey: Any, order: float
    ) -> Any:
        """Return this rank's contribution to the norm over all ranks."""
        params = parameters_of(optimizer), gathered.params, gathered.grads
        measured = RankGradients(*params, survey.parts, order, survey.norm)
        return self.agreement.measure(measured, self.names.model)

    def clip(
        self, work: Work, max_norm: Any, order: float, *, error: bool
    ) -> torch.Tensor:
        """Clip by the unscaled norm; return the norm before clipping.

        One multiplier unscales and clips gradients that are still scaled.  It is
        applied to `.grad` unless the optimizer unscales itself.
        """
        before = work.gathered
        with torch.no_grad():
            norm = self.norm(work, order)
            if norm is None:
                return torch.zeros_like(self.scale.now().tensor)
            if error and not norm.isfinite().item():
                raise errors.nonfinite_norm(order)
            factor = clip_factor_of(norm, max_norm)
            multiplier = factor if work.multiplier is None else work.multiplier * factor
            work.multiplier, work.clipped_norm = multiplier, norm * factor
            handed = unscales(work.optimizer) and work["stage"] is OptState.READY
            if handed or not backend.in_host_memory(multiplier):
                handed = self._can_divide(work, max_norm, handed=handed)
            if not handed:
                self.write(work, None if work.gathered is before else work.gathered)
        if self.iteration.scalings > 1 and work.freshness is not None:
            work.freshness.expect_backward()  # the pass of one loss may come later
        return norm

    def _can_divide(self, work: Work, max_norm: Any, *, handed: bool) -> bool:
        """Return whether 1 / multiplier is a float32 that the optimizer can divide by.

        If the host knows that it is not, the multiplier is applied to `.grad`.  If only
        the device knows, the flag is set there and the step is skipped: it would apply
        zeros, or with a negative `max_norm` reversed gradients.
        """
        multiplier: Any = work.multiplier
        number = multiplier.float()
        small = (number < SMALLEST if handed else number <= 0.0).float()
        if (seen := backend.host_value(small)) is not None:
            return handed and not seen
        found = combined(work["found_inf_per_device"], small.device)
        if found is not None and (isinstance(max_norm, torch.Tensor) or max_norm > 0):
            work["found_inf_per_device"] = {small.device: torch.maximum(found, small)}
        return handed

    def note_unscaled(self, work: Work) -> None:
        """Keep the gradient's version and, after an overflow, the norms.

        The user may edit `.grad` from now on.
        """
        work.first = work.first_gradient()
        if self.agreement.active:
            return  # the ranks have not combined their findings yet
        found = combined(work["found_inf_per_device"], self.scale.now().device)
        if found is not None and backend.host_value(found):
            gathered = work.gathered = gather(work.optimizer)
            work.survey = take_survey(gathered, torch.ones_like(found), order=2.0)
            work.norm = work.survey.norm

    def write(self, work: Work, gathered: Gathered | None = None) -> None:
        """Apply the multiplier to `.grad`, or to `gathered`: unscale and clip."""
        multiplier, work.multiplier = work.multiplier, None
        work["stage"] = OptState.UNSCALED
        if multiplier is not None:
            with torch.no_grad():
                multiply_(gathered or gather(work.optimizer), multiplier)
