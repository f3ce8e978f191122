"""Accelerate: `buoy.integrations.accelerate.use(accelerator, policy="headroom")`."""

from collections.abc import Iterable
from typing import Any

import torch

from buoy._core.errors import OptionError
from buoy.integrations.common import make_scaler, metrics
from buoy.torch import GradScaler

__all__ = ["metrics", "use"]


def use(accelerator: Any, policy: Any = None, **options: Any) -> GradScaler | None:
    """Give an `Accelerator` a scaler of Buoy; call it before `accelerator.prepare`.

    Skipped steps then do not advance schedulers, also with fused optimizers; several
    optimizers are divided by one scale; clipping concerns only the optimizer whose
    parameters are clipped.  On a CPU, where Accelerate trains in FP32 if asked for
    FP16, this turns FP16 autocast on.

    Args:
        accelerator: the `accelerate.Accelerator`.
        policy: a policy or its name; None for torch's rule, with the numbers of
            Accelerate's `GradScalerKwargs`.
        options: further arguments of `buoy.torch.GradScaler`.

    Returns:
        The scaler, which is also `accelerator.scaler`; None if `mixed_precision` is not
        "fp16": nothing is changed then.
    """
    if accelerator.mixed_precision != "fp16":
        return None
    kind = getattr(accelerator.distributed_type, "value", None)
    if kind in ("DEEPSPEED", "MEGATRON_LM"):
        message = (
            f"Under {kind} Accelerate leaves loss scaling to the engine, and has no "
            "scaler of its own. Pass DeepSpeed's engine, which `prepare` returns, to "
            "`buoy.integrations.deepspeed.use`; set Megatron's rule by its arguments."
        )
        raise OptionError(message)
    if accelerator._optimizers or accelerator._models:
        message = (
            "`use` was called after `accelerator.prepare`: what was prepared has kept "
            "Accelerate's own scaler. Call `use(accelerator)` before `prepare`."
        )
        raise OptionError(message)
    handler = accelerator.scaler_handler
    given = {} if handler is None else handler.to_kwargs()
    scaler = make_scaler(accelerator.device.type, policy, given, options)
    accelerator.scaler = scaler
    accelerator.native_amp = True  # off on a CPU
    if scaler.is_enabled():
        _Clipping(accelerator, scaler)
    return scaler


class _Clipping:
    """Unscales only the optimizers whose parameters are clipped.

    Accelerate unscales all: gradients of another loss that were not cleared would count
    as this one's.
    """

    def __init__(self, accelerator: Any, scaler: GradScaler) -> None:
        self.accelerator, self.scaler = accelerator, scaler
        self._norm, self._value = (
            accelerator.clip_grad_norm_,
            accelerator.clip_grad_value_,
        )
        self._unscale = accelerator.unscale_gradients
        self._concerned: list[Any] | None = None
        accelerator.clip_grad_norm_ = self.clip_grad_norm_
        accelerator.clip_grad_value_ = self.clip_grad_value_
        accelerator.unscale_gradients = self.unscale_gradients

    def clip_grad_norm_(
        self, parameters: Any, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor | None:
        """Clip as part of the check, if these are all parameters of one optimizer."""
        parameters = _listed(parameters)
        owners = self._owners(parameters)
        held = {id(param) for param in parameters}
        if len(owners) == 1 and all(id(p) in held for p in _gradients(owners[0])):
            return self.scaler.clip_grad_norm_(owners[0], max_norm, norm_type)
        self._concerned = owners
        try:
            norm: torch.Tensor | None = self._norm(parameters, max_norm, norm_type)
            return norm
        finally:
            self._concerned = None

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip the values of unscaled gradients."""
        parameters = _listed(parameters)
        self._concerned = self._owners(parameters)
        try:
            self._value(parameters, clip_value)
        finally:
            self._concerned = None

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale the given optimizers; without any, those that are being clipped."""
        self._unscale(self._concerned if optimizer is None else optimizer)

    def _owners(self, parameters: list[torch.Tensor]) -> list[Any]:
        """Return the optimizers, without Accelerate's wrappers, of some parameters."""
        ids = {id(param) for param in parameters}
        found = []
        for wrapper in self.accelerator._optimizers:
            optimizer = wrapper.optimizer
            groups = optimizer.param_groups
            if any(id(p) in ids for group in groups for p in group["params"]):
                found.append(optimizer)
        return found


def _listed(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _gradients(optimizer: Any) -> list[torch.Tensor]:
    """Return the parameters of an optimizer that have a gradient."""
    params = (p for group in optimizer.param_groups for p in group["params"])
    return [param for param in params if param.grad is not None]
