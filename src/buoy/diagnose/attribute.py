"""Which module went non-finite first, in which direction, and by how much.

The batch is run again under hooks, and nothing that training depends on is
changed.  If something is found, the passes run again in FP32, to measure how large it
would have been, and with what would be advised, to see whether it helps.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch

from buoy._core.errors import OptionError
from buoy.diagnose.culprit import Culprit, Part
from buoy.diagnose.hooks import Followed, Spot, parameter_spot, size_of
from buoy.diagnose.rehearse import (
    Rehearsed,
    RngState,
    StepFn,
    kept_aside,
    rehearse,
)
from buoy.diagnose.shadow import in_full_precision, with_one_in_fp32

__all__ = ["first_nonfinite"]


def first_nonfinite(
    model: torch.nn.Module,
    step_fn: StepFn,
    *,
    scale: float | None = None,
    rng: RngState | None = None,
    measure: bool = True,
) -> Culprit | None:
    """Find the first result of a step that is not finite; None if all are.

    Args:
        model: the model that contains the modules.
        step_fn: the forward and backward pass of the batch, as in training; or a
            function that returns the loss.  It is stopped before it unscales or steps.
        scale: multiplies the loss, instead of the scaler's current scale.
        rng: the state of the random generators to start from (see
            `buoy.diagnose.rng_state`), to repeat dropout.
        measure: whether to run it again, in FP32 to measure by how much it overflows,
            and with the advised change to see whether that helps; not with several
            ranks, where all must call this and some find nothing.

    Raises `OptionError` if `step_fn` runs no module of the model, or no backward pass:
    nothing was inspected, and None would be wrong.

    Example:
        >>> class Cube(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x.half() ** 3
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1), Cube())
        >>> _ = model[0].weight.data.fill_(100.0), model[0].bias.data.fill_(0.0)
        >>> first_nonfinite(model, lambda: model(torch.ones(1, 1)).sum()).module
        '1'
    """
    with kept_aside(model, rng):
        seen = Followed(model)
        with seen.hooked():
            run = rehearse(step_fn, scale=scale)
        spot, part = _first(seen, run.losses, model)
        _check_looked(seen, run, model, found=part is not None)
    if part is None:
        return None
    found = _culprit(seen, spot, part, scale=run.scale)
    if not measure or _among_ranks():
        return found
    return _Trial(model, step_fn, spot, scale, rng).of(found)


def _check_looked(
    seen: Followed, run: Rehearsed, model: torch.nn.Module, *, found: bool
) -> None:
    """Raise if nothing was inspected: that does not mean that all is finite."""
    if any(param.grad is not None for param in model.parameters()):
        return
    name = type(model).__name__
    if not seen.ran:
        bad = "" if size_of(run.losses).finite else " Its loss was not finite."
        message = (
            f"`step_fn` ran no module of the {name} that was passed as `model`, so "
            f"none of them could be inspected.{bad} Pass the model that `step_fn` runs."
        )
        raise OptionError(message)
    if not found and not run.backward:
        message = (
            f"`step_fn` ran the {name} forward, and that was finite, but it ran no "
            "backward pass and returned no loss. Let it call `backward`, or return "
            "the loss: a tensor of one element that requires a gradient."
        )
        raise OptionError(message)


def _among_ranks() -> bool:
    """Say whether other ranks, which may have found nothing, would be waited for."""
    spread = torch.distributed
    if not (spread.is_available() and spread.is_initialized()):
        return False
    return spread.get_world_size() > 1


def _first(
    seen: Followed, losses: list[torch.Tensor], model: torch.nn.Module
) -> tuple[Spot | None, Part | None]:
    """Choose the first non-finite value that reached the end."""
    bad_loss = not size_of(losses).finite
    if seen.forward and (bad_loss or not losses):
        return seen.forward[0], _part(seen.forward[0])
    if bad_loss:
        return None, "loss"
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    bad = next((name for name in grads if not size_of([grads[name]]).finite), None)
    if bad is None:
        return None, None
    spot = seen.backward[0] if seen.backward else parameter_spot(bad)
    return spot, _part(spot)


def _part(spot: Spot) -> Part:
    parent = spot.span.parent
    if spot.where == "input":
        return "between" if parent or spot.span.after else "input"
    if spot.where == "grad_output":
        return "between" if parent else "loss"
    if spot.where == "grad_parameter":
        return "module"
    return "between" if spot.span.first else "module"


class _Trial:
    """Runs the passes again, with what would be advised."""

    def __init__(
        self,
        model: torch.nn.Module,
        step_fn: StepFn,
        spot: Spot | None,
        scale: float | None,
        rng: RngState | None,
    ) -> None:
        self._model, self._step_fn, self._spot = model, step_fn, spot
        self._scale, self._rng = scale, rng

    def of(self, culprit: Culprit) -> Culprit:
        """Add how large it is in FP32, and what makes the step finite."""
        whole = self._run(in_full_precision(self._model), self._scale)
        culprit = replace(culprit, needed=self._needed(whole))
        if culprit.part == "input" or culprit.poisoned:
            return culprit
        if culprit.direction == "backward":
            return self._at_scale_one(culprit, whole)
        if culprit.part != "loss":
            kept = with_one_in_fp32(self._model, culprit.module)
            if self._passes(self._run(kept, self._scale)):
                return replace(culprit, cured_by="module")
        passes = self._passes(whole)
        if passes is None:
            return culprit
        return replace(culprit, cured_by="model" if passes else "nothing")

    def _at_scale_one(self, culprit: Culprit, whole: "_Passes | None") -> Culprit:
        if culprit.headroom is not None and culprit.headroom < 0.0:
            return replace(culprit, cured_by="scale")
        passes = self._run(nullcontext(), 1.0)
        if passes is None:
            return culprit
        if passes.part is None:
            return replace(culprit, cured_by="scale")
        in_fp32 = whole is not None and whole.part is None
        return replace(culprit, cured_by="model" if in_fp32 else "nothing")

    def _run(
        self, changed: AbstractContextManager[None], scale: float | None
    ) -> "_Passes | None":
        """Run the passes; None if they were written for FP16 alone."""
        try:
            with kept_aside(self._model, self._rng), changed:
                seen = Followed(self._model)
                with seen.hooked():
                    run = rehearse(self._step_fn, scale=scale)
                _, part = _first(seen, run.losses, self._model)
        except (RuntimeError, TypeError, ValueError):
            return None  # e.g. with a `.half()` in the middle
        return _Passes(seen, run, part)

    def _needed(self, whole: "_Passes | None") -> float | None:
        if whole is None or self._spot is None:
            return None
        size = whole.seen.size(self._spot)
        return size.amax if size is not None and size.finite and size.amax else None

    def _passes(self, passes: "_Passes | None") -> bool | None:
        """Say whether the forward pass was finite; None if it was not in FP32."""
        if passes is None:
            return None
        seen, losses = passes.seen, passes.run.losses
        if size_of(losses).finite and (losses or not seen.forward):
            return True
        casts = self._spot is not None and seen.dtype(self._spot) == "float16"
        return None if casts else False


class _Passes(NamedTuple):
    seen: Followed
    run: Rehearsed
    part: Part | None  # what was not finite


def _culprit(
    seen: Followed, spot: Spot | None, part: Part, *, scale: float | None
) -> Culprit:
    """Put together what is known of it."""
    if spot is None:
        return Culprit(module="", direction="forward", part=part, scale=scale)
    forward = spot.where in ("input", "output")
    outside = spot.where in ("input", "grad_output")  # the fault of who called it
    span = spot.span.parent if outside else spot.span
    name = "" if span is None else span.name
    module = seen.model.get_submodule(name)
    went = seen.size(spot)
    after, before = _neighbours(spot) if part == "between" else ("", "")
    return Culprit(
        module=name,
        kind=type(module).__name__,
        direction="forward" if forward else "backward",
        part=part,
        parameter=spot.parameter,
        after=after,
        before=before,
        dtype=seen.dtype(spot),
        input_amax=seen.amax_of(span, "input" if forward else "grad_output"),
        output_amax=None if went is None else went.amax,
        scale=scale,
        poisoned=tuple(
            name
            for name, param in module.named_parameters(recurse=False)
            if not size_of([param]).finite
        ),
    )


def _neighbours(spot: Spot) -> tuple[str, str]:
    span = spot.span
    if spot.where == "input":
        return span.after.name if span.after else "", span.name
    if spot.where == "output":
        return span.last.name if span.last else "", ""
    if spot.where == "grad_output":
        return span.name, ""
    return "", span.first.name if span.first else ""
