"""Accelerate: `buoy.integrations.accelerate.use(accelerator, policy="headroom")`."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from buoy._backends.torch.gradients import parameters_of
from buoy._core.errors import OptionError
from buoy._core.policies.policy import Policy
from buoy.integrations.common import make_scaler, metrics
from buoy.torch import GradScaler

__all__ = ["metrics", "use"]

Parameters = torch.Tensor | Iterable[torch.Tensor]


def use(
    accelerator: Any, policy: str | Policy | None = None, **options: Any
) -> GradScaler | None:
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
        self.accelerator = accelerator
        self.scaler = scaler
        # Accelerate's own methods.
        self._norm = accelerator.clip_grad_norm_
        self._value = accelerator.clip_grad_value_
        self._unscale = accelerator.unscale_gradients
        # The optimizers whose parameters are being clipped.
        self._concerned: list[Optimizer] | None = None
        accelerator.clip_grad_norm_ = self.clip_grad_norm_
        accelerator.clip_grad_value_ = self.clip_grad_value_
        accelerator.unscale_gradients = self.unscale_gradients

    def clip_grad_norm_(
        self, parameters: Parameters, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor | None:
        """Clip as part of the check, if these are all parameters of one optimizer."""
        params = _listed(parameters)
        owners = self._owners(params)
        if len(owners) == 1 and _holds_all(params, owners[0]):
            return self.scaler.clip_grad_norm_(owners[0], max_norm, norm_type)
        with self._clipping(owners):
            norm: torch.Tensor | None = self._norm(params, max_norm, norm_type)
        return norm

    def clip_grad_value_(self, parameters: Parameters, clip_value: float) -> None:
        """Clip the values of unscaled gradients."""
        params = _listed(parameters)
        with self._clipping(self._owners(params)):
            self._value(params, clip_value)

    def unscale_gradients(
        self, optimizer: Optimizer | list[Optimizer] | None = None
    ) -> None:
        """Unscale the given optimizers; without any, those that are being clipped."""
        self._unscale(self._concerned if optimizer is None else optimizer)

    @contextmanager
    def _clipping(self, owners: list[Optimizer]) -> Iterator[None]:
        self._concerned = owners
        try:
            yield
        finally:
            self._concerned = None

    def _owners(self, params: list[torch.Tensor]) -> list[Optimizer]:
        """Return the optimizers, without Accelerate's wrappers, of some parameters."""
        ids = {id(param) for param in params}
        optimizers = [wrapper.optimizer for wrapper in self.accelerator._optimizers]
        return [
            optimizer
            for optimizer in optimizers
            if any(id(param) in ids for param in parameters_of(optimizer))
        ]


def _listed(parameters: Parameters) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _holds_all(params: list[torch.Tensor], optimizer: Optimizer) -> bool:
    """Return whether a list holds every parameter that has a gradient."""
    ids = {id(param) for param in params}
    return all(id(p) in ids for p in parameters_of(optimizer) if p.grad is not None)
