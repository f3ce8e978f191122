"""One backward pass of apex.amp: scale, unscale, check, and skip the next step."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from buoy._backends import torch as backend
from buoy._core.policies.registry import policy
from buoy.torch import apply
from buoy.torch.apex.levels import Level
from buoy.torch.apex.session import Session
from buoy.torch.errors import ApexError
from buoy.torch.gather import parameters_of
from buoy.torch.scaler import GradScaler

__all__ = ["scaled", "scaler"]

log = logging.getLogger("buoy.torch.apex")

_FLOOR = 2.0**-24  # apex has none: a NaN loss takes it to 1e-320 and a division by zero
_SKIPS = "_buoy_apex_skips"


def scaler(
    level: Level, models: list[torch.nn.Module], bounds: tuple[float | None, float]
) -> GradScaler:
    """Make the scaler of one loss."""
    model = models[0] if len(models) == 1 else torch.nn.ModuleList(models)
    device = next((p.device.type for p in model.parameters()), "cpu")
    if level.loss_scale == "dynamic":
        low, high = bounds
        rule = policy(
            "apex",
            min_loss_scale=_FLOOR if low is None else low,
            max_loss_scale=high,
        )
    else:
        rule = policy("static", init_scale=float(level.loss_scale))
    return GradScaler(device, policy=rule, model=model)


@contextmanager
def scaled(
    session: Session,
    loss: torch.Tensor,
    optimizers: list[Any],
    loss_id: int,
    *,
    delay_unscale: bool,
) -> Iterator[torch.Tensor]:
    """Yield the scaled loss; then see to the gradients that it made."""
    if not 0 <= loss_id < len(session.scalers):
        raise ApexError(
            f"`loss_id` is {loss_id}, but `amp.initialize` was told of "
            f"{len(session.scalers)} losses. Pass `num_losses` to it."
        )
    _refuse_strangers(session, optimizers)
    scaler = session.scalers[loss_id]
    kept = [] if delay_unscale else _set_aside(session, optimizers)
    yield scaler.scale(loss.float())
    if delay_unscale:
        session.delayed |= set(map(id, optimizers))
        return
    scale = scaler._frozen_scale()
    looked = [_unscale(scaler, optimizer) for optimizer in optimizers]
    finite = all(looked)
    for optimizer in optimizers:
        record = scaler._per_optimizer_states[id(optimizer)]
        record["stage"] = OptState.STEPPED
        if record["found_inf_per_device"]:
            scaler._report(optimizer, record, scale)
    if any(r["found_inf_per_device"] for r in scaler._per_optimizer_states.values()):
        scaler.update()
    session.delayed -= set(map(id, optimizers))
    for param, grad in kept:
        param.grad = grad if param.grad is None else param.grad.add_(grad)
    if not finite:
        for optimizer in optimizers:
            _skip_once(optimizer)
        if session.talks:
            log.info(
                "Gradient overflow. Skipping step, loss scaler %d reducing loss scale "
                "to %g",
                loss_id,
                scaler.get_scale(),
            )


def _refuse_strangers(session: Session, optimizers: list[Any]) -> None:
    for optimizer in optimizers:
        if not any(optimizer is known for known in session.optimizers):
            raise ApexError(
                f"This {type(optimizer).__name__} was not passed through "
                "`amp.initialize`, so nothing would keep its steps safe. Pass all "
                "optimizers to it, in a list, and use what it returns."
            )


def _set_aside(
    session: Session, optimizers: list[Any]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keep gradients of earlier passes, unscaled already, apart from those to come."""
    kept = []
    for optimizer in optimizers:
        if id(optimizer) in session.delayed:
            continue
        for param in parameters_of(optimizer):
            if param.grad is not None:
                kept.append((param, param.grad))
                param.grad = None
    return kept


def _unscale(scaler: GradScaler, optimizer: Any) -> bool:
    """Unscale an optimizer's gradients; say whether they were finite."""
    scale, _ = scaler._check_scale_growth_tracker("scale_loss")
    record = scaler._per_optimizer_states[id(optimizer)]
    flags = scaler._unscale_grads_(
        optimizer, backend.reciprocal(scale), torch.zeros_like(scale), True
    )
    scaler._agree(record, flags)
    scaler._settle(record)
    found = apply.combined(record["found_inf_per_device"], scale.device)
    record["finite"] = found is None or scaler._ask(record, found)
    return bool(record["finite"])


def _skip_once(optimizer: Any) -> None:
    """Let the next `step` do nothing, however often this is asked for before it."""
    if optimizer.__dict__.get(_SKIPS):
        return
    own = optimizer.__dict__.get("step")

    def skipped(self: Any, closure: Any = None) -> None:
        if closure is not None:
            raise ApexError(
                "apex.amp does not take closures. Use `buoy.torch.GradScaler` and "
                "`scaler.step(optimizer, closure)`."
            )
        self.__dict__.pop("step")
        self.__dict__.pop(_SKIPS)
        self._opt_called = True  # or schedulers would say that it was not
        if own is not None:
            self.__dict__["step"] = own

    optimizer.__dict__[_SKIPS] = True
    optimizer.__dict__["step"] = MethodType(skipped, optimizer)
