"""Which module went non-finite first, in which direction, and by how much.

The batch is run again under hooks, and nothing that training depends on is
changed.  If something is found, the passes run again in FP32, to measure how large it
would have been, and with what would be advised, to see whether it helps.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from buoy._core.errors import OptionError
from buoy.diagnose.culprit import Culprit, Part
from buoy.diagnose.hooks import Followed, Span, Spot, parameter_spot, size_of
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
    return _Trial(model, step_fn, spot, scale, rng).tried(found)


def _check_looked(
    seen: Followed, run: Rehearsed, model: torch.nn.Module, *, found: bool
) -> None:
    """Raise if nothing was inspected: that does not mean that all is finite."""
    if any(param.grad is not None for param in model.parameters()):
        return
    name = type(model).__name__
    if not seen.ran:
        bad_loss = "" if size_of(run.losses).finite else " Its loss was not finite."
        message = (
            f"`step_fn` ran no module of the {name} that was passed as `model`, so "
            f"none of them could be inspected.{bad_loss} Pass the model that `step_fn` "
            "runs."
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
    """Return whether other ranks, which may have found nothing, would be waited for."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    return distributed.get_world_size() > 1


def _first(
    seen: Followed, losses: list[torch.Tensor], model: torch.nn.Module
) -> tuple[Spot | None, Part | None]:
    """Choose the first non-finite value that reached the end."""
    bad_loss = not size_of(losses).finite
    if seen.forward and (bad_loss or not losses):
        spot = seen.forward[0]
        return spot, _part(spot)
    if bad_loss:
        return None, "loss"

    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    bad = next((name for name in grads if not size_of([grads[name]]).finite), None)
    if bad is None:
        return None, None
    spot = seen.backward[0] if seen.backward else parameter_spot(bad)
    return spot, _part(spot)


def _part(spot: Spot) -> Part:
    """Say which part of the step computed this value."""
    span = spot.span
    match spot.where:
        case "input":
            return "between" if span.parent or span.after else "input"
        case "grad_output":
            return "between" if span.parent else "loss"
        case "grad_parameter":
            return "module"
        case "output" | "grad_input":
            return "between" if span.first else "module"


@dataclass(frozen=True, slots=True)
class _Trial:
    """Runs the passes again, with what would be advised."""

    model: torch.nn.Module
    step_fn: StepFn
    spot: Spot | None
    scale: float | None
    rng: RngState | None

    def tried(self, culprit: Culprit) -> Culprit:
        """Add how large it is in FP32, and what makes the step finite."""
        in_fp32 = self._run(in_full_precision(self.model), self.scale)
        culprit = replace(culprit, needed=self._needed(in_fp32))
        if culprit.part == "input" or culprit.poisoned:
            return culprit
        if culprit.direction == "backward":
            return self._at_scale_one(culprit, in_fp32)

        if culprit.part != "loss":
            one_in_fp32 = with_one_in_fp32(self.model, culprit.module)
            if self._forward_finite(self._run(one_in_fp32, self.scale)):
                return replace(culprit, cured_by="module")
        finite = self._forward_finite(in_fp32)
        if finite is None:
            return culprit
        return replace(culprit, cured_by="model" if finite else "nothing")

    def _at_scale_one(self, culprit: Culprit, in_fp32: "_Passes | None") -> Culprit:
        """Add whether a lower scale helps, or else FP32."""
        if culprit.headroom is not None and culprit.headroom < 0.0:
            return replace(culprit, cured_by="scale")
        unscaled = self._run(nullcontext(), 1.0)
        if unscaled is None:
            return culprit
        if unscaled.part is None:
            return replace(culprit, cured_by="scale")
        finite = in_fp32 is not None and in_fp32.part is None
        return replace(culprit, cured_by="model" if finite else "nothing")

    def _run(
        self, changed: AbstractContextManager[None], scale: float | None
    ) -> "_Passes | None":
        """Run the passes; None if they were written for FP16 alone."""
        try:
            with kept_aside(self.model, self.rng), changed:
                seen = Followed(self.model)
                with seen.hooked():
                    run = rehearse(self.step_fn, scale=scale)
                _, part = _first(seen, run.losses, self.model)
        except (RuntimeError, TypeError, ValueError):
            return None  # e.g. with a `.half()` in the middle
        return _Passes(seen, run.losses, part)

    def _needed(self, in_fp32: "_Passes | None") -> float | None:
        """Return how large the result is in FP32, where that is a number."""
        if in_fp32 is None or self.spot is None:
            return None
        size = in_fp32.seen.size(self.spot)
        if size is None or not size.finite or size.amax == 0.0:
            return None
        return size.amax

    def _forward_finite(self, passes: "_Passes | None") -> bool | None:
        """Return whether the forward pass was finite; None if it was not in FP32."""
        if passes is None:
            return None
        reached_the_end = bool(passes.losses) or not passes.seen.forward
        if reached_the_end and size_of(passes.losses).finite:
            return True
        casts = self.spot is not None and passes.seen.dtype(self.spot) == "float16"
        return None if casts else False


class _Passes(NamedTuple):
    """What one run of the passes showed."""

    seen: Followed
    losses: list[torch.Tensor]
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
    name = _name(span)
    module = seen.model.get_submodule(name)
    size = seen.size(spot)
    after = ""
    before = ""
    if part == "between":
        after, before = _neighbours(spot)

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
        output_amax=None if size is None else size.amax,
        scale=scale,
        poisoned=tuple(
            name
            for name, param in module.named_parameters(recurse=False)
            if not size_of([param]).finite
        ),
    )


def _neighbours(spot: Spot) -> tuple[str, str]:
    """Name the modules that ran before and after the code of this value."""
    span = spot.span
    match spot.where:
        case "input":
            return _name(span.after), span.name
        case "output":
            return _name(span.last), ""
        case "grad_output":
            return span.name, ""
        case "grad_input" | "grad_parameter":
            return "", _name(span.first)


def _name(span: Span | None) -> str:
    return "" if span is None else span.name
