"""A whole step as one graph, for `torch.compile(fullgraph=True)`.

There is no host read and no branch on a value: the same check, the same policy and the
same restore as with `sync="never"`, without the bookkeeping.  The outcome of a step
stays in tensors until `last_step` is read.  Gates, the log, recording and warnings need
the host and do not run here.
"""

from typing import Any, NamedTuple

import torch

from buoy._backends import torch as backend
from buoy._backends.torch.gradients import (
    Gathered,
    gather,
    magnitudes,
    multiply_,
    take_survey,
)
from buoy._backends.torch.measure import MEASURE
from buoy._core.errors import DeviceModeError
from buoy._core.step import clip_factor, schedule
from buoy.torch import errors
from buoy.torch.iteration import Work, merged
from buoy.torch.loss_check import LOSS
from buoy.torch.optimizers import step_or_restore
from buoy.torch.policy_runner import Evidence

__all__ = ["clip", "clipped_only", "report", "scale", "step", "update"]

# Use empty tuples, not None: torch 2.13 confuses a None with a gradient that the same
# graph has set to None.


class _Look(NamedTuple):
    """The findings about one optimizer's gradients."""

    optimizer: Any
    found: torch.Tensor  # float32 []: more than 0 if any is not finite
    multiplier: torch.Tensor  # float32 []: unscales and clips
    measured: dict[str, Any]  # by `Policy.wants`; NaN where it is not due
    norm: Any  # float32 []: unscaled, before clipping; None if not measured


class _Done(NamedTuple):
    """The outcome of the last iteration."""

    steps: tuple[tuple[_Look, torch.Tensor], ...]  # and whether each was skipped
    losses: tuple[torch.Tensor, ...]
    scale: torch.Tensor
    next_scale: torch.Tensor


def scale(scaler: Any, output: torch.Tensor) -> torch.Tensor:
    """Multiply by the scale; create its tensors on first use."""
    scale, iteration = scaler._loss_scale, scaler._iteration
    if scale.tensor is None:
        start = scaler._init_scale, scaler._init_growth_tracker
        scale.make_tensors(output.device, *start)
    if output.numel() == 1:
        loss = output.detach().reshape(())
        if "loss" in scale.wants and not (scale.foreseen or scaler._agreement.active):
            half = output.dtype is torch.float16
            held = scale.clipped
            scale.runner.lift(scale.tensor.device)
            scale.runner.follow(scale.tensor)
            scale.runner.foresee(loss, output.device, half=half, held=held)
            scale.tensor.copy_(scale.runner.scale)
            scale.foreseen = True
        iteration.compiled_losses = (loss,)
    if iteration.loss_check is not None:
        iteration.loss_check.add_compiled(output)
    scaled: torch.Tensor = output * scale.tensor
    return scaled


@torch.no_grad()
def clip(
    scaler: Any, optimizer: Any, max_norm: float, order: float, error: bool
) -> torch.Tensor:
    """Store the multiplier that unscales and clips; return the unscaled norm."""
    _refuse(scaler, optimizer)
    if error:
        raise DeviceModeError(
            "`error_if_nonfinite=True` must read the norm, which a compiled step "
            "cannot do. Leave it out: a step that overflows is skipped."
        )
    if any(one.optimizer is optimizer for one in scaler._iteration.compiled_looks):
        raise _untraced("a second clipping of the same gradients")
    seen = _look(scaler, optimizer, gather(optimizer), order)
    norm: torch.Tensor = seen.norm
    factor = seen.multiplier * clip_factor(norm, max_norm, backend.ops())
    scaler._iteration.compiled_looks += (seen._replace(multiplier=factor),)
    return norm


@torch.no_grad()
def step(scaler: Any, optimizer: Any) -> None:
    """Step, and restore the old values if the step must be skipped."""
    _refuse(scaler, optimizer)
    iteration = scaler._iteration
    if any(seen.optimizer is optimizer for seen, _ in iteration.compiled_steps):
        raise errors.step_twice()
    gathered = gather(optimizer)
    noted = [one for one in iteration.compiled_looks if one.optimizer is optimizer]
    seen = noted[-1] if noted else _look(scaler, optimizer, gathered)
    multiply_(gathered, seen.multiplier)
    twin = _Traceable(optimizer)
    step_or_restore(optimizer, seen.found, (twin,), {}, step=_unwrapped(twin.kind.step))
    iteration.compiled_steps += ((seen, seen.found),)


@torch.no_grad()
def update(scaler: Any) -> None:
    """Update the scale."""
    iteration, scale = scaler._iteration, scaler._loss_scale
    steps = iteration.compiled_steps
    if not steps:
        raise errors.nothing_recorded()
    iteration.compiled_looks = iteration.compiled_steps = ()
    before = scale.tensor.clone()
    found = torch.stack([seen.found for seen, _ in steps]).max()
    measured = merged([seen.measured for seen, _ in steps], found.device)
    scale.move_on_device(Evidence(found, None, measured))
    scale.foreseen = False
    if iteration.loss_check is not None:
        iteration.loss_check.clear()
    scale.compiled_updates.add_(1)
    losses, after = iteration.compiled_losses, scale.tensor.clone()
    scaler._log.compiled = _Done(steps, losses, before, after)


def report(scaler: Any) -> None:
    """Add the outcome of the last compiled iteration to the scaler's log."""
    done, scaler._log.compiled = scaler._log.compiled, None
    for seen, skipped in done.steps:
        work = Work()
        work.optimizer, work.norm = seen.optimizer, seen.norm
        outcome = scaler._log.add(work, skipped, done.scale, done.losses)
        outcome._next = done.next_scale


# -- inspecting ------------------------------------------------------------------------


def _look(
    scaler: Any, optimizer: Any, gathered: Gathered, order: float | None = None
) -> _Look:
    """Check the gradients, and measure what the policy wants."""
    if not gathered.grads:
        raise errors.no_gradients()
    scale, check = scaler._loss_scale, scaler._iteration.loss_check
    inverse, turn = scale.tensor.reciprocal(), scale.turn + scale.compiled_updates
    whole = gathered if order is None else magnitudes(gathered, order)
    survey = take_survey(whole, inverse, order=order, amax=True)
    measured: dict[str, Any] = {}
    amax: Any = survey.amax
    wanted = schedule(scale.wants, clips=order is not None and order >= 1.0)
    for name, one in wanted.items():
        take, due = MEASURE.get(name), one.due(turn)
        value = take(gathered.buckets, inverse.device) if take else amax.float()
        measured[name] = value if due is True else torch.where(due, value, torch.nan)
    if check is not None:
        measured[LOSS] = check.number(inverse.device)
    norm = survey.norm
    if norm is not None:
        norm = (norm * inverse if order else norm).float()  # 0: a count
    return _Look(optimizer, survey.found, inverse, measured, norm)


# -- stepping --------------------------------------------------------------------------


def _unwrapped(method: Any) -> Any:
    """Return a method without torch's wrappers, which break the graph."""
    while hasattr(method, "__wrapped__"):
        method = method.__wrapped__
    return method


# Looked up here: torch 2.15 cannot trace the search.
_OPTIMIZERS = [one for one in vars(torch.optim).values() if hasattr(one, "_init_group")]
_INIT_GROUP = {kind: _unwrapped(kind._init_group) for kind in _OPTIMIZERS}


class _Traceable:
    """An optimizer's parameter groups and state in a class that the compiler traces.

    The compiler treats `torch.optim.Optimizer` specially, and refuses to step one in
    the graph that computed its gradients; it traces the same code run on this class.
    """

    grad_scale = found_inf = None

    def __init__(self, optimizer: Any) -> None:
        self.kind = type(optimizer)
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        self.defaults = optimizer.defaults

    def _init_group(self, *args: Any) -> Any:
        init_group = _INIT_GROUP.get(self.kind) or _unwrapped(self.kind._init_group)
        return init_group(self, *args)

    def _cuda_graph_capture_health_check(self) -> None:
        """Nothing to check: the compiler itself requires `capturable`."""

    _accelerator_graph_capture_health_check = _cuda_graph_capture_health_check


# -- refusals --------------------------------------------------------------------------


def _refuse(scaler: Any, optimizer: Any) -> None:
    """Raise for what cannot be traced, or for half of a step."""
    kind = type(optimizer).__name__
    plain = isinstance(optimizer, torch.optim.SGD) and not any(
        group["momentum"] for group in optimizer.param_groups
    )
    what = ""
    if scaler._agreement.active:
        what = "a step of several ranks: they could not agree on its outcome"
    elif getattr(optimizer, "_step_supports_amp_scaling", False):
        what = f"into fused {kind}. Build it with `fused=False`: the compiler fuses it"
    elif getattr(optimizer, "_buoy_masters", None) is not None:
        what = "a step with master weights, which replace the parameters in it"
    elif not plain and not optimizer.state:
        what = (
            f"the first step of {kind}, which creates its state and could not be "
            "undone. Take one step without torch.compile first"
        )
    elif len(scaler._per_optimizer_states):
        what = (
            "a part of a step: after `unscale_` or clipping outside of the compiled "
            "function, the gradients would be divided by the scale twice"
        )
    if what:
        raise _untraced(what)


def _untraced(what: str) -> DeviceModeError:
    return DeviceModeError(
        f"torch.compile does not trace {what}. Otherwise, leave all of `unscale_`, "
        "`clip_grad_norm_`, `step` and `update` out of the compiled function; the "
        "model may stay in it."
    )


def clipped_only() -> DeviceModeError:
    """Return the error for a step outside of the graph that has clipped."""
    return _untraced("a part of a step: this one would ignore the graph's clipping")
