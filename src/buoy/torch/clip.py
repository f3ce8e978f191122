"""Clipping from the same survey that checks: one read, one multiplier."""

import math
import weakref
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from buoy._backends import torch as backend
from buoy.torch import agree, options, replicas, survey, traced, words
from buoy.torch.errors import NonfiniteNormError
from buoy.torch.fingerprint import Look
from buoy.torch.gather import (
    Gathered,
    add_up_sparse,
    gather,
    owners,
    parameters_of,
    sorted_by_kind,
)
from buoy.torch.report import Reporting
from buoy.torch.takers import hands_over

__all__ = ["Clipping"]


class Clipping(Reporting):
    """Clip while unscaling, or after it where that has been done by hand."""

    def clip_grad_norm_(
        self,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """Clip the unscaled gradients' total norm; return what it was before.

        Call it between `backward()` and `step`, instead of `unscale_` and
        `torch.nn.utils.clip_grad_norm_`.  For an optimizer that takes `grad_scale`
        nothing is written: what it divides by does both.  For others the gradients
        are unscaled and clipped by one multiplication.  The norm is inf or NaN when
        the step will be skipped; it is a tensor, and reading it waits.

        Example:
            >>> import buoy.torch
            >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
            >>> optimizer = torch.optim.SGD([weight], lr=0.1)
            >>> scaler = buoy.torch.GradScaler("cpu")
            >>> scaler.scale((weight**2).sum()).backward()
            >>> scaler.clip_grad_norm_(optimizer, max_norm=1.0)
            tensor(10.)
        """
        given = optimizer, max_norm, float(norm_type), error_if_nonfinite
        if not self._enabled:
            return self._clip_as_torch(*given)
        options.limit("max_norm", max_norm)
        if torch.compiler.is_compiling():
            return traced.clip(self, *given)
        if self._ranks.groups():
            options.shared_order(float(norm_type))
        record = self._record_to_clip(optimizer, "clip_grad_norm_")
        if record["stage"] is OptState.READY and self._unscales_otherwise():
            self.unscale_(optimizer)
        if record["stage"] is OptState.UNSCALED:
            return self._clip_as_torch(*given)
        with backend.NoGrad():
            norm = self._surveyed_norm(optimizer, record, float(norm_type))
            if norm is None:
                return torch.zeros((), dtype=torch.float32, device=self._home())
            self._tighten(record, norm, max_norm)
            if hands_over(optimizer):
                record["looked"] = Look(optimizer)
            else:
                self._write_multiplier(optimizer, record)
        if error_if_nonfinite and not math.isfinite(norm.item()):
            raise NonfiniteNormError(_nonfinite(norm_type))
        return norm

    def clip_grad_value_(self, optimizer: Any, clip_value: float) -> None:
        """Clamp every unscaled gradient to [-clip_value, clip_value].

        Example:
            >>> import buoy.torch
            >>> weight = torch.nn.Parameter(torch.tensor([3.0, 0.2]))
            >>> optimizer = torch.optim.SGD([weight], lr=0.1)
            >>> scaler = buoy.torch.GradScaler("cpu")
            >>> scaler.scale((weight**2).sum()).backward()
            >>> scaler.clip_grad_value_(optimizer, 1.0)
            >>> weight.grad
            tensor([1.0000, 0.4000])
        """
        options.limit("clip_value", clip_value)
        add_up_sparse(optimizer)
        if self._enabled:
            record = self._record_to_clip(optimizer, "clip_grad_value_")
            if record["stage"] is OptState.READY:
                self.unscale_(optimizer)
        limit = float(clip_value)
        with torch.no_grad():
            for _, _, grads in gather(optimizer).buckets:
                torch._foreach_clamp_min_(grads, -limit)
                torch._foreach_clamp_max_(grads, limit)

    def _record_to_clip(self, optimizer: Any, method: str) -> dict[str, Any]:
        """Give an optimizer's record, if its gradients may be clipped now."""
        self._check_scale_growth_tracker(method)
        record: dict[str, Any] = self._per_optimizer_states[id(optimizer)]
        if record["stage"] is OptState.STEPPED:
            raise words.unscale_after_step(method)
        self._refuse_changed(record, method)
        return record

    def _surveyed_norm(
        self, optimizer: Any, record: dict[str, Any], order: float
    ) -> torch.Tensor | None:
        """Give the norm as clipped so far; look again only for one of another order."""
        if "multiplier" not in record:
            self._survey_norm(optimizer, record, order)
            record["order"] = order
        norm: torch.Tensor | None = record.get("clipped_norm", record.get("norm"))
        if record.get("order", 2.0) == order:
            return norm
        multiplier, record["order"] = record["multiplier"], order
        if self._ranks.groups():
            norm, _ = self._shared_norm(optimizer, record, order)
        else:
            sizes = _magnitudes(optimizer, order)
            norm = survey.measure(sizes, order, multiplier).norm
        return None if norm is None else (norm * multiplier).float()

    def _survey_norm(
        self, optimizer: Any, record: dict[str, Any], order: float
    ) -> None:
        """Look at the scaled gradients once; note norm, flag and multiplier."""
        scale, _ = self._check_scale_growth_tracker("clip_grad_norm_")
        gathered = self._halves.gather(optimizer, self._names, hands_over(optimizer))
        if not gathered.plain:
            add_up_sparse(optimizer)
            gathered = gather(optimizer)
        shared = bool(self._ranks.groups())
        if not (gathered.grads or shared):
            return
        self._guide.before_look(optimizer)
        inverse = self._inverse(scale)
        sizes = gathered if shared else _magnitudes(optimizer, order, gathered)
        seen = survey.measure(sizes, order, inverse)
        norm, found = seen.norm, {scale.device: seen.found}
        if norm is not None and not shared:
            record["norm"] = (norm * inverse).float()
        held = owners(optimizer, len(gathered.grads))
        record["parts"] = (list(map(weakref.ref, held)), seen.parts)
        record["multiplier"] = inverse
        record["groups"] = optimizer.param_groups
        if self._rule.wants or self._listeners:
            self._look(optimizer, record, gathered, inverse)
        if shared:
            record["plan"] = replicas.plan(self, optimizer, seen, order)
        self._agree(record, found if gathered.grads else {}, norm)
        if shared:
            norm = replicas.global_norm(self, optimizer, record, gathered, seen, order)
            record.pop("plan", None)
            if record["found_inf_per_device"]:
                record.setdefault("norm", (norm * inverse).float())

    def _tighten(
        self, record: dict[str, Any], norm: torch.Tensor, max_norm: float
    ) -> None:
        """Put a clipping coefficient into the multiplier."""
        coefficient = survey.clipping(norm, max_norm)
        record["multiplier"] = record["multiplier"] * coefficient
        record["clipped_norm"] = norm * coefficient

    def _write_multiplier(self, optimizer: Any, record: dict[str, Any]) -> None:
        """Unscale and clip in place, for whoever reads `.grad` itself."""
        multiplier = record.pop("multiplier")
        with torch.no_grad():
            for device, _, grads in gather(optimizer).buckets:
                backend.multiply_(grads, multiplier.to(device, non_blocking=True))
        record["stage"] = OptState.UNSCALED
        record["groups"] = optimizer.param_groups
        record["looked"] = Look(optimizer)

    def _clip_as_torch(
        self, optimizer: Any, max_norm: float, norm_type: float, error: bool
    ) -> torch.Tensor:
        if self._enabled and self._ranks.groups():
            norm = self._clip_shared(optimizer, max_norm, float(norm_type))
            if error and not math.isfinite(norm.item()):
                raise NonfiniteNormError(_nonfinite(norm_type))
        else:
            # Torch has no largest element of nothing.
            some = [param for param in parameters_of(optimizer) if param.numel()]
            norm = torch.nn.utils.clip_grad_norm_(
                some, max_norm, norm_type, error_if_nonfinite=error
            )
        if self._enabled:
            self._per_optimizer_states[id(optimizer)].setdefault("norm", norm)
        return norm

    @torch.no_grad()
    def _clip_shared(
        self, optimizer: Any, max_norm: float, order: float
    ) -> torch.Tensor:
        """Clip gradients that are unscaled already, by the norm over all ranks."""
        record = self._per_optimizer_states[id(optimizer)]
        norm, gathered = self._shared_norm(optimizer, record, order)
        coefficient = survey.clipping(norm.float(), max_norm)
        for device, _, grads in gathered.buckets:
            backend.multiply_(grads, coefficient.to(device, non_blocking=True))
        return norm.float()

    def _shared_norm(
        self, optimizer: Any, record: dict[str, Any], order: float
    ) -> tuple[torch.Tensor, Gathered]:
        """Take the norm over all ranks of gradients that were looked at before."""
        one = torch.ones((), dtype=torch.float32, device=self._home())
        gathered = gather(optimizer)
        seen = survey.measure(gathered, order, one)
        self._settle(record)
        if order == math.inf and seen.norm is not None:
            self._ranks.note("largest")
            own = agree.orderly(seen.norm.float())
            record["largest"] = self._ranks.largest("largest", own)
        norm = replicas.global_norm(self, optimizer, record, gathered, seen, order)
        return norm, gathered


def _magnitudes(
    optimizer: Any, order: float, gathered: Gathered | None = None
) -> Gathered:
    """Find the gradients to measure: of complex ones the magnitudes, not the parts."""
    found = gather(optimizer) if gathered is None else gathered
    if found.plain:
        return found
    held = owners(optimizer)
    if order == 2.0 or not any(param.is_complex() for param in held):
        return found
    sizes = [
        torch.view_as_complex(grad).abs() if param.is_complex() else grad
        for param, grad in zip(held, found.grads, strict=True)
    ]
    return sorted_by_kind(sizes)


def _nonfinite(norm_type: float) -> str:
    return (
        f"The total norm of order {norm_type} for gradients from `parameters` is "
        "non-finite, so it cannot be clipped. With loss scaling an overflow now and "
        "then is normal and the step is skipped by itself: to go on, leave "
        "`error_if_nonfinite=False`."
    )
