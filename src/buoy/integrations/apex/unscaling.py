"""What follows a backward pass: check and unscale, and skip a step where needed."""

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer

from buoy.torch import CallOrderError, GradScaler
from buoy.torch.features.masters import masters_of

__all__ = ["Gradients", "skip_once"]

_SKIPS = "_buoy_apex_skips"


class Gradients:
    """An optimizer's gradients, as an optimizer whose `step` only unscales them.

    It is given to a scaler in the optimizer's place, and takes `grad_scale` and
    `found_inf` as torch's fused optimizers do: so gradients in FP16 can be unscaled,
    and the scaler decides and keeps a record of it without an update.
    """

    # No `__dict__`: the scaler is not to find the optimizer in here and step it.
    __slots__ = (
        "__weakref__",
        "finite",
        "found_inf",
        "grad_scale",
        "optimizer",
        "scaled",
    )
    _step_supports_amp_scaling = True
    found_inf: torch.Tensor | int
    grad_scale: torch.Tensor | None

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.finite = True
        self.scaled = False  # by an earlier pass, to be unscaled with the next

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's current parameter groups, also after loading or adding."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Mapping[torch.Tensor, Any]:
        """The optimizer's own."""
        return self.optimizer.state

    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """List the parameters that have a gradient, each with its own."""
        held = (param for group in self.param_groups for param in group["params"])
        return [(param, param.grad) for param in held if param.grad is not None]

    def set_aside(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Take away, and return, what earlier passes made and is unscaled already."""
        if self.scaled:
            return []
        kept = self.pairs()
        for param, _ in kept:
            param.grad = None
        return kept

    def check(self, scaler: GradScaler) -> bool:
        """Unscale the gradients; return whether they were finite."""
        masters = masters_of(self.optimizer)
        if masters is not None:
            masters.widen()
        if not any(grad.dtype is torch.float16 for _, grad in self.pairs()):
            scaler.unscale_(self)  # type: ignore[arg-type]
        scaler.step(self)  # type: ignore[arg-type]
        self.scaled = False
        return self.finite

    def step(self) -> None:
        """Unscale what is scaled still; the scaler calls this."""
        self.finite = not self.found_inf
        if self.grad_scale is None:
            return
        for _, grad in self.pairs():
            # In FP32: a scale above 65504 is an inf in FP16.
            grad.copy_(grad.float() / self.grad_scale.to(grad.device))


def skip_once(optimizer: Optimizer) -> None:
    """Let the next `step` do nothing, however often this is asked for before it."""
    if optimizer.__dict__.get(_SKIPS):
        return
    own = optimizer.__dict__.get("step")  # where a scheduler has wrapped it

    def skipped(self: Any, closure: Callable[[], float] | None = None) -> None:
        if closure is not None:
            message = (
                "apex.amp does not take closures. Use `buoy.torch.GradScaler` and "
                "`scaler.step(optimizer, closure)`."
            )
            raise CallOrderError(message)
        self.__dict__.pop("step")
        self.__dict__.pop(_SKIPS)
        self._opt_called = True  # or schedulers would say that it was not
        if own is not None:
            self.__dict__["step"] = own

    optimizer.__dict__[_SKIPS] = True
    optimizer.__dict__["step"] = MethodType(skipped, optimizer)
