"""The three ways to apply or skip a step.

* `hand_over`: the optimizer takes `grad_scale` and `found_inf`, and decides.
* `ask`: the host reads the flag once, and steps or does not.
* `undo`: no host read; the step is computed, and if it must be skipped, everything that
  it changed is restored on the device.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.amp.grad_scaler import OptState

from buoy._backends import torch as backend
from buoy._backends.torch.gradients import gather, parameters_of
from buoy._backends.torch.snapshot import OptimizerSnapshot, zeroed_gradients
from buoy._core.errors import OptionError
from buoy._core.warn import warn
from buoy.torch import errors
from buoy.torch.hooks import Scaler
from buoy.torch.pending import Pending, combined

__all__ = [
    "ask",
    "hand_over",
    "pass_scaler",
    "read_outcome",
    "recipients",
    "takes_scaler",
    "takes_scaling",
    "undo",
    "unscales",
    "unscales_in_place",
]

_DECLARED = "_step_supports_amp_scaling"
_TORCHS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
_PLAIN = frozenset(_TORCHS)


# -- which optimizers take `grad_scale` and `found_inf` --------------------------------


class Recipients(NamedTuple):
    """The optimizers that read `grad_scale` and `found_inf`."""

    found: tuple[Any, ...]  # empty: attributes set on the wrapper would never be read
    sure: bool  # each gradient is divided exactly once; else unscale before the step


def unscales(optimizer: Any) -> bool:
    """Return whether an optimizer, or one that it wraps, divides by `grad_scale`."""
    if not getattr(optimizer, _DECLARED, False) or takes_scaler(optimizer):
        return False
    return recipients(optimizer).sure


def takes_scaling(optimizer: Any) -> bool:
    """Return whether an optimizer takes `found_inf`, itself or one that it wraps."""
    if not getattr(optimizer, _DECLARED, False):
        return False
    plain = type(optimizer) in _PLAIN
    return plain or takes_scaler(optimizer) or bool(recipients(optimizer).found)


def recipients(optimizer: Any) -> Recipients:
    """Find the optimizers that read both, for one that declares support.

    A wrapper may declare support only because it forwards attribute access to the
    optimizer inside; attributes set on the wrapper would never be read.
    """
    if type(optimizer) in _PLAIN:
        return Recipients((optimizer,), sure=True)
    inside = tuple(one for one in _held_by(optimizer) if getattr(one, _DECLARED, False))
    if _declares(optimizer):
        # It may read both itself, or the optimizer inside may.
        return Recipients((optimizer, *inside), sure=not inside)
    own = getattr(getattr(optimizer, "step", None), "__self__", optimizer)
    if own is not optimizer:  # `step` is forwarded to the optimizer inside
        inside = (own,) if getattr(own, _DECLARED, False) else ()
    found = [recipients(one) for one in inside]
    params = sorted(id(param) for one in inside for param in parameters_of(one))
    each_once = params == sorted(map(id, parameters_of(optimizer)))
    sure = each_once and all(one.sure for one in found)
    return Recipients(tuple(each for one in found for each in one.found), sure=sure)


def _declares(optimizer: Any) -> bool:
    """Return whether the object itself declares support, not one that it wraps."""
    if _DECLARED in getattr(optimizer, "__dict__", ()):
        return True
    for kind in type(optimizer).__mro__:
        if _DECLARED in vars(kind):
            return not isinstance(vars(kind)[_DECLARED], property)
    return False


def _held_by(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizers that one wraps, in attributes or lists."""
    for name, value in list(getattr(optimizer, "__dict__", {}).items()):
        if name in ("param_groups", "state", "defaults"):
            continue
        for one in value if isinstance(value, (list, tuple)) else (value,):
            if one is not optimizer and hasattr(one, "param_groups"):
                yield one


_TAKES_SCALER: WeakKeyDictionary[Callable[..., Any], bool] = WeakKeyDictionary()


def takes_scaler(optimizer: Any) -> bool:
    """Return whether an optimizer's `step` has an argument `grad_scaler`."""
    if type(optimizer) in _PLAIN:
        return False
    step = optimizer.step
    step = getattr(step, "__func__", step)
    try:
        return _TAKES_SCALER[step]
    except (KeyError, TypeError):  # not seen yet, or no weak references to it
        found = "grad_scaler" in inspect.signature(step).parameters
    with suppress(TypeError):
        _TAKES_SCALER[step] = found
    return found


def unscales_in_place(optimizer: Any) -> bool:
    """Return whether an applied step leaves unscaled gradients in `.grad`.

    Torch's own kernels do; for others it is unknown.
    """
    return all(
        any(getattr(type(one), "step", None) is kind.step for kind in _TORCHS)
        for one in recipients(optimizer).found or (optimizer,)
    )


# -- the optimizer decides -------------------------------------------------------------


def hand_over(
    pending: Pending,
    found: torch.Tensor | None,
    scale: torch.Tensor | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    ask_first: bool,
) -> Any:
    """Step an optimizer that divides by `grad_scale` and skips if `found_inf` is set.

    `found` is the flag, None without gradients; `scale` is that of gradients which were
    neither unscaled nor clipped.  With `ask_first` the host reads the flag, and does
    not call the optimizer to skip a step.
    """
    optimizer = pending.optimizer
    if found is None and gather(optimizer).grads:
        raise errors.no_gradients(errors.UNSCALED_EARLY)
    if found is not None:
        if ask_first:
            read_outcome(pending, found)
            if not pending.applied:
                return None
        if pending.survey is None or found is not pending.survey.found:
            found = (found > 0).float()  # torch's kernels skip only at exactly 1
    grad_scale = None
    pending.handed_over = pending.stage is not OptState.UNSCALED
    if pending.handed_over:
        factor = pending.factor
        grad_scale = scale if factor is None else factor.reciprocal()
    takers = recipients(optimizer).found
    if found is not None:
        for taker in takers:
            _fill_momentum(taker)
    for taker in takers:
        _give(taker, grad_scale, found)
    try:
        return optimizer.step(*args, **kwargs)
    finally:
        for taker in takers:
            del taker.grad_scale
            del taker.found_inf


def _give(
    taker: Any, grad_scale: torch.Tensor | None, found: torch.Tensor | None
) -> None:
    """Set both attributes; a `grad_scale` that the user has set is multiplied."""
    own = getattr(taker, "grad_scale", None)
    if grad_scale is not None:
        own = grad_scale if own is None else grad_scale * own
    taker.grad_scale = own
    taker.found_inf = 0 if found is None else found


def pass_scaler(
    scaler: Scaler,
    pending: Pending,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Step an optimizer that takes the scaler, and checks its gradients itself."""
    warn(errors.PASSES_ITSELF, FutureWarning)
    pending.handed_over = pending.stage is not OptState.UNSCALED
    return pending.optimizer.step(*args, **kwargs, grad_scaler=scaler)


def _fused_momentum(optimizer: Any) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """Yield parameter group, parameter and state where a fused SGD has no momentum."""
    for group in optimizer.param_groups:
        if not (group.get("fused") and group.get("momentum")):
            continue
        for param in group["params"]:
            state = optimizer.state[param]
            if param.grad is not None and state.get("momentum_buffer") is None:
                yield group, param, state


def _fill_momentum(optimizer: Any) -> None:
    """Initialise the momentum of a fused SGD with zeros.

    Torch allocates these buffers uninitialised, and a skipped first step leaves them
    so.  From zeros the first step has the same result as without a buffer, but not with
    dampening, which does not apply to the first momentum.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group, param, state in _fused_momentum(optimizer):
        if group.get("dampening"):
            raise OptionError(errors.FUSED_DAMPENING)
        zeros = torch.zeros_like(param.grad, memory_format=torch.preserve_format)
        state["momentum_buffer"] = zeros


# -- the host decides ------------------------------------------------------------------


def ask(
    pending: Pending, found: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Step if the flag is 0; the host reads it, which waits for the device."""
    read_outcome(pending, found)
    return pending.optimizer.step(*args, **kwargs) if pending.applied else None


def read_outcome(pending: Pending, found: torch.Tensor) -> None:
    """Read whether the step is applied, and all that the policy needs, in one transfer.

    `found` is the flag that the step uses.  Raises if it shows that ranks differ.
    """
    number = backend.known(found)
    if number is not None:
        pending.applied = not number
        return
    own: Any = combined(pending.flags, found.device)
    differs = torch.zeros_like(found) if pending.differs is None else pending.differs
    names = list(pending.measured)
    numbers = [pending.measured[name] for name in names]
    skipped, bad, apart, *values = backend.read([found, own, differs, *numbers])
    if apart and pending.mismatch is not None:
        raise pending.mismatch()
    pending.applied = not skipped
    pending.finite = not bad
    pending.measured = dict(zip(names, values, strict=True))


# -- the device decides ----------------------------------------------------------------


def undo(
    optimizer: Any,
    found: torch.Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    step: Any = None,
) -> Any:
    """Step; keep the result if `found` is 0, restore the old values if it is 1.

    A step that will be undone runs with zero gradients (sparse ones stay), so that the
    optimizer's hooks never see non-finite weights.  A step that raises is undone.
    """
    snapshot = OptimizerSnapshot(optimizer)
    snapshot.check_device()
    skip = found > 0
    if step is not None:  # compiled: without hooks, and nothing raises
        result = step(*args, **kwargs)
        snapshot.restore_where(skip)
        return result
    with zeroed_gradients(optimizer, skip):
        try:
            result = optimizer.step(*args, **kwargs)
        except BaseException:
            snapshot.restore_where(torch.ones_like(skip))
            raise
    snapshot.restore_where(skip)
    return result
