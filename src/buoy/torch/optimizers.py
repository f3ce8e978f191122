"""The three ways to apply or skip a step.

* `step_with_found_inf`: the optimizer takes `grad_scale` and `found_inf`, and decides.
* `read_finite`: the host reads the flag once, and steps or does not.
* `step_or_restore`: no host read; the step is computed, and if it must be skipped,
  everything that it changed is restored on the device.
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
from buoy.torch import errors
from buoy.torch.iteration import Work

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
    return recipients(optimizer).sure and not _begins_dampened(optimizer)


def takes_scaling(optimizer: Any) -> bool:
    """Return whether an optimizer takes `found_inf`, itself or one that it wraps."""
    if not getattr(optimizer, _DECLARED, False) or _begins_dampened(optimizer):
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


def step_with_found_inf(
    work: Work,
    whom: tuple[Any, ...],
    scale: torch.Tensor,
    found: torch.Tensor | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    ask: bool = False,
) -> Any:
    """Step an optimizer that divides by `grad_scale` and skips if `found_inf` is set.

    `whom` are the recipients of both.  `scale` is the factor of its gradients, unless
    they are already unscaled.  With `ask` the host reads the flag, and does not call
    the optimizer to skip a step.
    """
    optimizer = work.optimizer
    if found is None and gather(optimizer).grads:
        raise errors.no_gradients(errors.UNSCALED_EARLY)
    work.handed = work["stage"] is not OptState.UNSCALED
    own = None if work.survey is None else work.survey.found
    if found is not None and found is not own:
        found = (found > 0).float()  # torch's kernels skip only at exactly 1
    seen = None if found is None else backend.host_value(found)
    work.finite = None if seen is None else not seen
    if ask and found is not None:
        work.finite = read_finite(work, found)
        if not work.finite:
            return None
    if work.multiplier is not None:
        scale = work.multiplier.reciprocal().float()
    for one in whom:
        if found is not None and isinstance(one, torch.optim.SGD):
            _fill_momentum(one)
    for one in whom:
        own = getattr(one, "grad_scale", None)
        if work.handed:
            own = scale if own is None else scale * own
        one.grad_scale, one.found_inf = own, 0 if found is None else found
    try:
        return optimizer.step(*args, **kwargs)
    finally:
        for one in whom:
            del one.grad_scale
            del one.found_inf


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
    so.  From zeros the first step has the same result as without a buffer.
    """
    for _, param, state in _fused_momentum(optimizer):
        zeros = torch.zeros_like(param.grad, memory_format=torch.preserve_format)
        state["momentum_buffer"] = zeros


def _begins_dampened(optimizer: Any) -> bool:
    """Return whether this is the first step of a fused SGD with dampening.

    Dampening does not apply to the first momentum.  The host passes a flag for the
    first step to torch's kernel, so the host must know whether the step is applied.
    """
    if type(optimizer) is not torch.optim.SGD:
        return False
    return any(group.get("dampening") for group, _, _ in _fused_momentum(optimizer))


# -- the host decides ------------------------------------------------------------------


def read_finite(work: Work, found: torch.Tensor) -> bool:
    """Return whether all gradients are finite; read all numbers in one transfer.

    Raises if it shows that ranks differ.
    """
    more = work.measured or work.differs is not None
    if not more or backend.in_host_memory(found):
        return not found.item()
    names, home = list(work.measured), found.device
    numbers = [backend.scalar(work.measured[name], home) for name in names]
    differs = torch.zeros_like(found) if work.differs is None else work.differs
    flag, apart, *values = torch.stack([found, differs, *numbers]).tolist()
    if apart and work.mismatch is not None:
        raise work.mismatch()
    work.measured = dict(zip(names, values, strict=True))
    work.amax = work.measured.get("amax_log2", work.amax)
    return not flag


# -- the device decides ----------------------------------------------------------------


def step_or_restore(
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
