"""A whole step as one graph: what `torch.compile(fullgraph=True)` can trace.

Nothing is asked, nothing is told, nothing depends on a value: the same survey, the
same policy and the same selection as in device mode, without the bookkeeping.  What
became of the step is left in tensors for whoever reads `last_step`; gates, the log and
alarms belong to the host, which hears nothing.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from buoy._backends import torch as backend
from buoy.torch import survey, words
from buoy.torch.errors import DeviceModeError
from buoy.torch.gather import owners
from buoy.torch.masters import masters_of
from buoy.torch.rule import Evidence
from buoy.torch.select import selected_step

if TYPE_CHECKING:
    from buoy.torch.report import Reporting

__all__ = ["NOTHING", "Look", "Outcome", "clip", "scale", "step", "update"]

# Not None: torch 2.13 mixes that up with a gradient that the same graph set to None.
NOTHING: tuple[()] = ()


class Look(NamedTuple):
    """What the gradients of one optimizer showed, before it stepped."""

    found: torch.Tensor
    multiplier: torch.Tensor
    amax: torch.Tensor
    norm: torch.Tensor | None


class Outcome(NamedTuple):
    """What became of the last step that a graph took."""

    optimizer: Any
    found: torch.Tensor
    amax: torch.Tensor
    norm: torch.Tensor | None
    loss: torch.Tensor | None = None
    scale: Any = None  # float32 []: before and after `update`
    next_scale: Any = None


def scale(scaler: "Reporting", output: torch.Tensor) -> torch.Tensor:
    """Multiply by the scale, made on first use."""
    if scaler._scale is None:
        device = output.device
        scaler._scale = torch.full(
            (), scaler._init_scale, dtype=torch.float32, device=device
        )
        count = scaler._init_growth_tracker
        scaler._growth_tracker = torch.full((), count, dtype=torch.int32, device=device)
    if output.numel() == 1:
        loss = output.detach().reshape(())
        if not scaler._ranks.groups():
            scaler._rule.foresee(scaler, loss)
        scaler._traced_loss = loss
    return output * scaler._scale


def _grads(optimizer: Any) -> list[torch.Tensor]:
    found: list[Any] = [param.grad for param in owners(optimizer)]
    return found


def _bare(method: Any) -> Any:
    """Take a method without torch's wrappers, which break the graph."""
    while hasattr(method, "__wrapped__"):
        method = method.__wrapped__
    return method


class _Twin:
    """An optimizer's groups and state under a class that the compiler traces plainly.

    The compiler knows `torch.optim.Optimizer`, and refuses to step one in the graph
    that computed its gradients; it has nothing against the same code run on this.
    """

    grad_scale = found_inf = None

    def __init__(self, optimizer: Any) -> None:
        self.kind = type(optimizer)
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        self.defaults = optimizer.defaults

    def _init_group(self, *args: Any) -> Any:
        return _bare(self.kind._init_group)(self, *args)

    def _cuda_graph_capture_health_check(self) -> None:
        """Nothing to check: `capturable` is asked for by the compiler itself."""

    _accelerator_graph_capture_health_check = _cuda_graph_capture_health_check


def _refuse(scaler: "Reporting", optimizer: Any) -> None:
    if scaler._ranks.groups():
        message = (
            "torch.compile does not trace a step that other ranks take part in: its "
            "outcome would not be theirs. Leave `scaler.clip_grad_norm_`, `step` and "
            "`update` out of the compiled function; the model may stay in it."
        )
        raise DeviceModeError(message)
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        message = (
            f"torch.compile does not trace into fused {type(optimizer).__name__}. "
            "Build it with `fused=False`: the compiler fuses it; or leave "
            "`scaler.step` out "
            "of the compiled function."
        )
        raise DeviceModeError(message)
    if masters_of(optimizer) is not None:
        message = (
            "torch.compile does not trace a step with master weights: they stand in "
            "for the parameters while the optimizer steps. Leave `scaler.step` out of "
            "the compiled function."
        )
        raise DeviceModeError(message)
    plain = isinstance(optimizer, torch.optim.SGD) and not any(
        group["momentum"] for group in optimizer.param_groups
    )
    if not plain and not optimizer.state:
        message = (
            f"{type(optimizer).__name__} makes its state on its first step, which "
            "cannot be traced and undone. Take one step without torch.compile first."
        )
        raise DeviceModeError(message)


def _refuse_mixed(scaler: "Reporting") -> None:
    """Refuse to go on from what an eager call has left half done."""
    if len(scaler._per_optimizer_states):
        message = (
            "`unscale_` or clipping was called outside of the compiled function, and "
            "`step` inside of it: the gradients would be divided by the scale twice. "
            "Put all of unscaling, clipping, `step` and `update` inside, or all "
            "outside."
        )
        raise DeviceModeError(message)


def _inverse(scaler: "Reporting") -> torch.Tensor:
    return scaler._home_scale().reciprocal()


@torch.no_grad()
def clip(
    scaler: "Reporting", optimizer: Any, max_norm: float, order: float, error: bool
) -> torch.Tensor:
    """Note the multiplier that unscales and clips; return the unscaled norm."""
    _refuse_mixed(scaler)
    if error:
        message = (
            "`error_if_nonfinite=True` has to know the norm, and a compiled step asks "
            "nobody. Leave it out: a step that overflows is skipped by itself."
        )
        raise DeviceModeError(message)
    grads = _grads(optimizer)
    inverse = _inverse(scaler)
    norm = torch.linalg.vector_norm(torch.stack(backend.norms(grads, order)), order)
    largest = backend.amax(grads)
    count = float(sum(grad.numel() for grad in grads))
    bound = largest * count ** (1.0 / order)
    norm = torch.where(backend.nonfinite(norm), bound, norm) * inverse
    coefficient = survey.clipping(norm, max_norm)
    found = backend.nonfinite(largest * inverse).float()
    scaler._noted = Look(found, inverse * coefficient, largest, norm)
    return norm


@torch.no_grad()
def step(scaler: "Reporting", optimizer: Any) -> None:
    """Step; put back what must not count."""
    _refuse(scaler, optimizer)
    _refuse_mixed(scaler)
    grads = _grads(optimizer)
    look, before = scaler._noted, scaler._traced
    if before and before.optimizer is optimizer:
        raise words.step_twice()
    if not look:
        inverse, amax = _inverse(scaler), backend.amax(grads)
        found = backend.nonfinite(amax * inverse).float()
        look = Look(found, inverse, amax, None)
    torch._foreach_mul_(grads, look.multiplier)
    twin = _Twin(optimizer)
    selected_step(optimizer, look.found, (twin,), {}, step=_bare(twin.kind.step))
    found, amax = look.found, look.amax
    if before:
        found, amax = before.found + found, torch.maximum(before.amax, amax)
    scaler._noted = NOTHING
    scaler._traced = Outcome(optimizer, found, amax, look.norm)


@torch.no_grad()
def update(scaler: "Reporting") -> None:
    """Move the scale."""
    outcome = scaler._traced
    if not outcome:
        raise words.nothing_recorded()
    scaler._traced = NOTHING
    used = scaler._home_scale().clone()
    scaler._rule.move(scaler, Evidence(outcome.found, amax=outcome.amax))
    left = scaler._home_scale().clone()
    scaler._untold = outcome._replace(
        loss=scaler._traced_loss, scale=used, next_scale=left
    )
