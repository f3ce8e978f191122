"""Which module went non-finite first, in which direction, and by how much.

The batch is run once more under hooks; nothing that training depends on is changed,
and nothing is raised.  If something is found, the passes run another time in FP32 to
measure how large it would have been.
"""

import torch

from buoy.diagnose.culprit import Culprit, Part
from buoy.diagnose.hooks import Followed, Spot, size_of
from buoy.diagnose.rehearse import RngState, StepFn, kept_aside, rehearse
from buoy.diagnose.shadow import in_full_precision

__all__ = ["first_nonfinite"]


def first_nonfinite(
    model: torch.nn.Module,
    step_fn: StepFn,
    *,
    scale: float | None = None,
    rng: RngState | None = None,
    measure: bool = True,
) -> Culprit | None:
    """Find what in a step was not finite first; None if all of it is.

    Args:
        model: whose modules are to be watched.
        step_fn: the forward and backward pass of the batch, as in training; it may
            also just return the loss.  It is stopped before it unscales or steps.
        scale: what to multiply the loss by instead of the scaler's present scale.
        rng: the random numbers to start from (see `buoy.diagnose.rng_state`), for
            dropout as it was.
        measure: whether to run it a second time, in FP32, to measure by how much; not
            among several ranks, where all have to call this and some find nothing.

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
    if part is None:
        return None
    if spot is None:
        return Culprit(module="", direction="forward", part=part, scale=run.scale)
    needed = None
    if measure and not _among_ranks():
        needed = _measured(model, step_fn, spot, scale=scale, rng=rng)
    return _culprit(seen, spot, part, needed=needed, scale=run.scale)


def _among_ranks() -> bool:
    """Say whether other ranks, which may have found nothing, would be waited for."""
    spread = torch.distributed
    if not (spread.is_available() and spread.is_initialized()):
        return False
    return spread.get_world_size() > 1


def _first(
    seen: Followed, losses: list[torch.Tensor], model: torch.nn.Module
) -> tuple[Spot | None, Part | None]:
    """Choose among what was not finite: what came first and did reach the end."""
    bad_loss = not size_of(losses).finite
    if seen.forward and (bad_loss or not losses):
        return seen.forward[0], _part(seen.forward[0])
    if bad_loss:
        return None, "loss"
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    if size_of(grads).finite or not seen.backward:
        return None, None
    return seen.backward[0], _part(seen.backward[0])


def _part(spot: Spot) -> Part:
    parent = spot.span.parent
    if spot.where == "input":
        return "between" if parent or spot.span.after else "input"
    if spot.where == "grad_output":
        return "between" if parent else "loss"
    if spot.where == "grad_parameter":
        return "module"
    return "between" if spot.span.first else "module"


def _measured(
    model: torch.nn.Module,
    step_fn: StepFn,
    spot: Spot,
    *,
    scale: float | None,
    rng: RngState | None,
) -> float | None:
    """Run the passes in FP32; tell how large it is there at the same place."""
    try:
        with kept_aside(model, rng), in_full_precision(model):
            seen = Followed(model)
            with seen.hooked():
                rehearse(step_fn, scale=scale)
    except (RuntimeError, TypeError, ValueError):
        return None  # written for FP16 alone, e.g. with a `.half()` in the middle
    size = seen.size(spot)
    return size.amax if size is not None and size.finite and size.amax else None


def _culprit(
    seen: Followed, spot: Spot, part: Part, *, needed: float | None, scale: float | None
) -> Culprit:
    """Put together what is known of it."""
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
        needed=needed,
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
