"""A whole step as one graph, for `torch.compile(fullgraph=True)`.

There is no host read and no branch on a value: the same check, the same policy and the
same restore as with `sync="never"`, without the bookkeeping.  The outcome of a step
stays in tensors until `last_step` is read.  Gates, the log, recording and warnings need
the host and do not run here.
"""

from typing import Any, NamedTuple

import torch

from buoy._backends import torch as backend
from buoy._backends.torch.gradients import Gathered, gather, multiply_
from buoy._backends.torch.inspection import inspect
from buoy._core.errors import DeviceModeError
from buoy._core.step import clip_factor, schedule
from buoy.torch import errors
from buoy.torch.hooks import Scaler
from buoy.torch.optimizers import undo
from buoy.torch.pending import Pending, merged
from buoy.torch.scale import (
    DeviceScale,
    Evidence,
    KernelScale,
    Measured,
    Number,
    Plan,
)

__all__ = ["clip", "report", "scale", "step", "update"]

# Use empty tuples, not None: torch 2.13 confuses a None with a gradient that the same
# graph has set to None.


class _Surveyed(NamedTuple):
    """The findings about one optimizer's gradients."""

    optimizer: Any
    found: torch.Tensor  # float32 []: more than 0 if any is not finite
    factor: torch.Tensor  # float32 []: unscales and clips
    measured: Measured  # NaN where it is not due
    norm: torch.Tensor | None  # float32 []: unscaled, before clipping


class _Done(NamedTuple):
    """The outcome of the last iteration."""

    steps: tuple[tuple[_Surveyed, torch.Tensor], ...]  # and whether each was skipped
    losses: tuple[torch.Tensor, ...]
    scale: torch.Tensor
    next_scale: torch.Tensor


def scale(scaler: Scaler, output: torch.Tensor) -> torch.Tensor:
    """Multiply by the scale; create its tensors on first use."""
    iteration = scaler._iteration
    scale = _device_scale(scaler, output.device)
    if output.numel() == 1:
        loss = output.detach().reshape(())
        wanted = "loss" in scale.wants and not scale.has_foreseen
        if wanted and not scaler._ranks.several:
            scale.apply_loss(loss.float())
            scale.has_foreseen = True
        iteration.compiled_losses = (loss,)
    if iteration.loss_check is not None:
        iteration.loss_check.add_compiled(output)
    return output * scale.tensor


def _device_scale(scaler: Scaler, device: torch.device) -> KernelScale | DeviceScale:
    """Return the scale as only the device knows it; create its tensors if needed."""
    scale = scaler._loss_scale
    if isinstance(scale, Plan):
        start = scaler._init_scale, scaler._init_growth_tracker
        scaler._loss_scale = scale = scale.place_in_graph(device, *start)
    else:
        scaler._loss_scale = scale = scale.on_device()
    return scale


@torch.no_grad()
def clip(
    scaler: Scaler,
    optimizer: Any,
    max_norm: Number,
    order: float,
    *,
    error: bool,
) -> torch.Tensor:
    """Store the factor that unscales and clips; return the unscaled norm."""
    _refuse(scaler, optimizer)
    if error:
        raise DeviceModeError(
            "`error_if_nonfinite=True` must read the norm, which a compiled step "
            "cannot do. Leave it out: a step that overflows is skipped."
        )
    if any(one.optimizer is optimizer for one in scaler._iteration.compiled_surveys):
        raise errors.untraced("a second clipping of the same gradients")
    seen = _survey(scaler, optimizer, gather(optimizer), order)
    norm: Any = seen.norm
    factor = seen.factor * clip_factor(norm, max_norm, backend.ops())
    scaler._iteration.compiled_surveys += (seen._replace(factor=factor),)
    return norm  # type: ignore[no-any-return]


@torch.no_grad()
def step(scaler: Scaler, optimizer: Any) -> None:
    """Step, and restore the old values if the step must be skipped."""
    _refuse(scaler, optimizer)
    iteration = scaler._iteration
    if any(seen.optimizer is optimizer for seen, _ in iteration.compiled_steps):
        raise errors.step_twice()
    gathered = gather(optimizer)
    noted = [one for one in iteration.compiled_surveys if one.optimizer is optimizer]
    seen = noted[-1] if noted else _survey(scaler, optimizer, gathered)
    multiply_(gathered, seen.factor)
    twin = _Traceable(optimizer)
    undo(optimizer, seen.found, (twin,), {}, step=_unwrapped(twin.kind.step))
    iteration.compiled_steps += ((seen, seen.found),)


@torch.no_grad()
def update(scaler: Scaler) -> None:
    """Update the scale."""
    iteration = scaler._iteration
    steps = iteration.compiled_steps
    if not steps:
        raise errors.nothing_recorded()
    iteration.compiled_surveys = iteration.compiled_steps = ()
    scale = _device_scale(scaler, steps[0][0].found.device)
    before = scale.tensor.clone()
    found = torch.stack([seen.found for seen, _ in steps]).max()
    measured = merged([seen.measured for seen, _ in steps], found.device)
    scale.apply(Evidence(found, None, measured))
    scale.has_foreseen = False
    if iteration.loss_check is not None:
        iteration.loss_check.clear()
    scale.compiled_updates.add_(1)
    losses = iteration.compiled_losses
    after = scale.tensor.clone()
    scaler._log.compiled = _Done(steps, losses, before, after)


def report(scaler: Scaler) -> None:
    """Add the outcome of the last compiled iteration to the scaler's log."""
    done = scaler._log.compiled
    scaler._log.compiled = None
    step = scaler._loss_scale.turns() - 1
    for seen, skipped in done.steps:
        pending = Pending(seen.optimizer, norm=seen.norm)
        outcome = scaler._log.add(pending, skipped, done.scale, done.losses, step=step)
        outcome.complete(done.next_scale)


# -- inspecting ------------------------------------------------------------------------


def _survey(
    scaler: Scaler,
    optimizer: Any,
    gathered: Gathered,
    order: float | None = None,
) -> _Surveyed:
    """Check the gradients, and measure what the policy wants."""
    if not gathered.grads:
        raise errors.no_gradients()
    scale = _device_scale(scaler, gathered.grads[0].device)
    inverse = scale.tensor.reciprocal()
    turn = scale.turn + scale.compiled_updates
    wanted = schedule(scale.wants, clips=order is not None and order >= 1.0)
    survey = inspect(gathered, inverse, order=order, wanted=list(wanted))
    measured: Measured = {}
    for name, one in wanted.items():
        due = one.due(turn)
        value = survey.measured[name]
        measured[name] = value if due is True else torch.where(due, value, torch.nan)
    measured |= scaler._iteration.findings(inverse.device)
    norm = survey.norm
    if norm is not None and order:  # 0: a count
        norm = norm * inverse
    return _Surveyed(optimizer, survey.found, inverse, measured, norm)


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
        self.param_groups = optimizer.param_groups
        self.state = optimizer.state
        self.defaults = optimizer.defaults

    def _init_group(self, *args: Any) -> Any:
        init_group = _INIT_GROUP.get(self.kind) or _unwrapped(self.kind._init_group)
        return init_group(self, *args)

    def _cuda_graph_capture_health_check(self) -> None:
        """Nothing to check: the compiler itself requires `capturable`."""

    _accelerator_graph_capture_health_check = _cuda_graph_capture_health_check


# -- refusals --------------------------------------------------------------------------


def _refuse(scaler: Scaler, optimizer: Any) -> None:
    """Raise for what cannot be traced, or for half of a step."""
    kind = type(optimizer).__name__
    plain = isinstance(optimizer, torch.optim.SGD) and not any(
        group["momentum"] for group in optimizer.param_groups
    )
    what = ""
    if scaler._ranks.several:
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
        raise errors.untraced(what)
