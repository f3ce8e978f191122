"""Where an update is applied or skipped, in the three ways there are.

* `handed_over`: the optimizer takes `grad_scale` and `found_inf` and decides itself.
* `settled`: the host asks once whether the gradients were finite, and steps or not.
* `selected_step`, of `select`: nobody asks; the step is computed and, where it must
  not count, everything that it changed is put back on the device.
"""

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import OptState

from buoy.torch import aloud, dampened, holes, survey, words
from buoy.torch.gather import gather
from buoy.torch.masters import masters_of
from buoy.torch.select import selected_step
from buoy.torch.takers import takers, takes_scaler

if TYPE_CHECKING:
    from buoy.torch.contract import Contract

__all__ = [
    "add_cause",
    "combined",
    "handed_over",
    "largest",
    "outcome",
    "own",
    "see",
    "settled",
    "total",
]


def combined(
    found: dict[torch.device, torch.Tensor], home: torch.device
) -> torch.Tensor | None:
    """Add the flags of several devices up on one."""
    if len(found) == 1 and home in found:
        flag = found[home]
        return flag.reshape(()) if flag.dim() else flag  # others use a shape of [1]
    flags = [flag.to(home, non_blocking=True).reshape(()) for flag in found.values()]
    if not flags:
        return None
    total = flags[0]
    for flag in flags[1:]:
        total = total + flag
    return total


def add_cause(record: dict[str, Any], flag: torch.Tensor, home: torch.device) -> None:
    """Give a step one more reason not to be applied, which the policy is not told."""
    found = combined(record["found_inf_per_device"], home)
    if found is None:
        return
    record.setdefault("own", record["found_inf_per_device"])
    both = torch.maximum(found, flag.to(home, non_blocking=True))
    record["found_inf_per_device"] = {home: both}


def own(record: dict[str, Any]) -> dict[torch.device, torch.Tensor]:
    """Give the flags that the policy learns from: of this scale's gradients alone."""
    flags: dict[torch.device, torch.Tensor] = record.get(
        "own", record["found_inf_per_device"]
    )
    return flags


def outcome(record: dict[str, Any], home: torch.device) -> bool | None:
    """Tell whether those were finite, if the host knows it."""
    if "own" not in record:
        finite: bool | None = record.get("finite")
        return finite
    found = combined(record["own"], home)
    seen = None if found is None else survey.seen_by_host(found)
    return None if seen is None else not seen


def total(
    flags: list[dict[torch.device, torch.Tensor]], home: torch.device
) -> torch.Tensor:
    """Add the flags of several optimizers up; there is at least one."""
    sums = [found for some in flags if (found := combined(some, home)) is not None]
    whole = sums[0]
    for more in sums[1:]:
        whole = whole + more
    return whole


def largest(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Take the largest of what several optimizers' gradients measured."""
    found: dict[str, Any] = {}
    for name in ("amax", "underflow"):
        tensors = [record[name] for record in records if name in record]
        if tensors:
            found[name] = torch.stack(tensors).max()
        numbers = [r[f"{name}_read"] for r in records if f"{name}_read" in r]
        if numbers:
            found[f"{name}_read"] = max(numbers)
    return found


def handed_over(
    scaler: "Contract",
    optimizer: Any,
    record: dict[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Let an optimizer that knows of scaling do its part."""
    if takes_scaler(optimizer):
        return _passed_itself(scaler, optimizer, record, args, kwargs)
    whom, sure = takers(optimizer)
    if record["stage"] is OptState.READY:
        if not sure:
            record["stepping"] = True
            scaler.unscale_(optimizer)
        elif "multiplier" not in record and "surveyed" not in record:
            scaler._check_inf_per_device(optimizer)
    scale, found = scaler._hand_over(record)
    if found is None and gather(optimizer).grads:
        raise words.no_gradients([_EARLY])
    if found is not None:
        see(record, found)
    unscaled = record["stage"] is OptState.UNSCALED
    record["handed"] = not unscaled
    for one in whom:
        own = getattr(one, "grad_scale", None)
        if not unscaled:
            own = scale if own is None else scale * own
        one.grad_scale, one.found_inf = own, 0 if found is None else found
    try:
        if found is not None and not scaler._strict and holes.open_in(whom):
            return _plugged(optimizer, whom, record, args, kwargs)
        return optimizer.step(*args, **kwargs)
    finally:
        for one in whom:
            del one.grad_scale
            del one.found_inf


_EARLY = (
    "They have some now: `unscale_` was called before `backward()`. Call it after the "
    "last backward pass of the iteration."
)


def see(record: dict[str, Any], found: torch.Tensor) -> None:
    """Note what the host can see of the outcome without asking a device."""
    seen = survey.seen_by_host(found)
    if seen is None:
        return
    record["finite"] = not seen
    for name in ("amax", "underflow"):
        if name in record:
            record[f"{name}_read"] = survey.seen_by_host(record[name])


def _plugged(
    optimizer: Any,
    whom: tuple[Any, ...],
    record: dict[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Step, with the fused optimizers' holes closed."""
    some = []
    for one in whom:
        holes.fill_momentum(one)
        fresh = dampened.fresh(one, finite=record.get("finite"))
        some += [(one, fresh)] if fresh else []
    if not some:
        return optimizer.step(*args, **kwargs)
    if record.get("finite") is False:
        return None
    held = [(param, param.grad) for _, fresh in some for param, _ in fresh]
    for param, _ in held:
        param.grad = None
    try:
        result = optimizer.step(*args, **kwargs)
    finally:
        for param, grad in held:
            param.grad = grad
    for one, fresh in some:
        dampened.step(
            one, fresh, one.grad_scale, one.found_inf, finite=record.get("finite")
        )
    return result


def _passed_itself(
    scaler: "Contract",
    optimizer: Any,
    record: dict[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    aloud.warn(
        "GradScaler is going to stop passing itself as a keyword argument to the "
        "passed optimizer. In the near future GradScaler registers "
        "`grad_scale: Tensor` and "
        "`found_inf: Tensor` to the passed optimizer and let the optimizer use them "
        "directly.",
        FutureWarning,
    )
    result = optimizer.step(*args, **{**kwargs, "grad_scaler": scaler})
    record["handed"] = record["stage"] is not OptState.UNSCALED
    return result


def settled(
    scaler: "Contract",
    optimizer: Any,
    record: dict[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Step or do not step an optimizer that knows nothing of scaling."""
    found = combined(record["found_inf_per_device"], scaler._home())
    if found is None:
        return None
    if scaler._never_sync:
        masters = masters_of(optimizer)
        with nullcontext() if masters is None else masters.swapped():
            return selected_step(optimizer, found, args, kwargs)
    record["finite"] = finite = scaler._ask(record, found)
    return optimizer.step(*args, **kwargs) if finite else None
