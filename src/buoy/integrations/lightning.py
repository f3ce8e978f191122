"""Lightning: precision plugins for Trainer and Fabric, and a callback that logs.

Example::

    Trainer(plugins=[MixedPrecision("16-mixed", "cuda", policy="headroom")])
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from buoy._core.errors import MissingBackendError, OptionError
from buoy._core.policies.policy import Policy
from buoy.integrations.common import make_scaler, metrics
from buoy.torch import GradScaler

try:
    from lightning.fabric.plugins import MixedPrecision as _OfFabric
    from lightning.pytorch import Callback as _Callback
    from lightning.pytorch.plugins import MixedPrecision as _OfTrainer
    from lightning.pytorch.plugins.precision import Precision as _Precision
except ImportError as error:
    message = (
        "`buoy.integrations.lightning` needs Lightning, which is not installed. "
        "Install it with `pip install lightning`."
    )
    raise MissingBackendError(message) from error

__all__ = ["FabricMixedPrecision", "LogScale", "MixedPrecision", "metrics"]

Mixed = Literal["16-mixed", "bf16-mixed"]
Scaler = torch.amp.GradScaler
Closure = Callable[[], Any]


def _scaler(
    precision: str,
    device: str,
    scaler: Scaler | None,
    policy: str | Policy | None,
    options: dict[str, Any],
) -> Scaler | None:
    """Return the scaler of a plugin: the one given, ours, or none for BF16."""
    if precision != "16-mixed" or scaler is not None:
        return scaler
    return make_scaler(device, policy, {}, options)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


class MixedPrecision(_OfTrainer):  # type: ignore[misc]
    """Lightning's plugin for "16-mixed", with a scaler of Buoy.

    Skipped steps advance neither LR schedules, nor `global_step`, nor what follows it
    (`WeightAveraging`).  Gradients are unscaled before `on_before_optimizer_step`, and
    clipped, also with fused optimizers.  LBFGS works.  Several optimizers of manual
    optimization are divided by one scale.  On a CPU, where the Trainer's own
    `precision="16-mixed"` means BF16, this is FP16.

    Args:
        precision: "16-mixed", or "bf16-mixed", which turns scaling off.
        device: the device type; by default "cuda" if there is one, else "cpu".
        scaler: a scaler to use instead of one made from the arguments below.
        policy: a policy or its name; None for torch's rule.
        count: "applied": `global_step` and `max_steps` count applied steps, until
            `patience` steps in a row are skipped; "attempted": all, as in Lightning.
        options: further arguments of `buoy.torch.GradScaler`.
    """

    def __init__(
        self,
        precision: Mixed = "16-mixed",
        device: str | None = None,
        scaler: Scaler | None = None,
        *,
        policy: str | Policy | None = None,
        count: Literal["applied", "attempted"] = "applied",
        **options: Any,
    ) -> None:
        if count not in ("applied", "attempted"):
            message = f"`count` must be 'applied' or 'attempted', got {count!r}."
            raise OptionError(message)
        device = device or _device()
        chosen = _scaler(precision, device, scaler, policy, options)
        super().__init__(precision, device, chosen)
        self.count = count
        self._skips_in_a_row = 0
        self._gated: Any = None  # the module whose `lr_scheduler_step` is gated

    def pre_backward(self, tensor: torch.Tensor, module: Any) -> torch.Tensor:
        """Scale the loss."""
        if self.scaler is not None and self._gated is not module:
            self._gate_schedulers(module)
        scaled: torch.Tensor = super().pre_backward(tensor, module)
        return scaled

    def optimizer_step(
        self, optimizer: Optimizer, model: Any, closure: Closure, **kwargs: Any
    ) -> Any:
        """Run the closure, unscale, clip, and step unless the gradients overflowed."""
        scaler = self.scaler
        if scaler is None:
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        if isinstance(optimizer, torch.optim.LBFGS):
            evaluate = partial(self._evaluate, optimizer, model, closure)
            result = scaler.step(optimizer, evaluate, **kwargs)
        else:
            result = closure()
            if result is None and model.automatic_optimization:
                return result  # `training_step` returned None: no backward pass
            self._unscale(optimizer)
            self._after_closure(model, optimizer)
            result = scaler.step(optimizer, **kwargs)
        scaler.update()
        self._count(optimizer, model)
        return result

    def _evaluate(self, optimizer: Optimizer, model: Any, closure: Closure) -> Any:
        result = closure()
        self._unscale(optimizer)
        self._after_closure(model, optimizer)
        return result

    def _unscale(self, optimizer: Optimizer) -> None:
        """Unscale, and measure the norm in the same pass."""
        scaler = self.scaler
        if isinstance(scaler, GradScaler):
            scaler.clip_grad_norm_(optimizer, math.inf)
        scaler.unscale_(optimizer)

    def _skipped(self, optimizer: Optimizer) -> bool:
        last = self.scaler.last_step_of(optimizer)
        return last is not None and not last.applied

    # -- clipping ----------------------------------------------------------------------

    def clip_gradients(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Clip unscaled gradients, also those of a fused optimizer."""
        optimizer = getattr(optimizer, "_optimizer", optimizer)  # a LightningOptimizer
        _Precision.clip_gradients(self, optimizer, *args, **kwargs)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip by the norm of the unscaled gradients."""
        if self.scaler is None:
            super().clip_grad_by_norm(optimizer, clip_val)
        else:
            self.scaler.clip_grad_norm_(optimizer, clip_val)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip the values of the unscaled gradients."""
        if self.scaler is None:
            super().clip_grad_by_value(optimizer, clip_val)
        else:
            self.scaler.clip_grad_value_(optimizer, clip_val)

    # -- what counts steps -------------------------------------------------------------

    def _count(self, optimizer: Optimizer, model: Any) -> None:
        """Take a skipped step back from `global_step`, which is raised after this."""
        if self.count == "attempted":
            return
        skipped = self._skipped(optimizer)
        self._skips_in_a_row = self._skips_in_a_row + 1 if skipped else 0
        # Or `max_steps` would never be reached if every step is skipped.
        if skipped and self._skips_in_a_row <= self.scaler._options.patience:
            loop = model.trainer.fit_loop.epoch_loop
            if model.automatic_optimization:
                steps = loop.automatic_optimization.optim_progress.optimizer.step
            else:
                steps = loop.manual_optimization.optim_step_progress
            steps.total.completed -= 1
            steps.current.completed -= 1

    def _gate_schedulers(self, module: Any) -> None:
        """Do not step schedulers of interval "step" after a skipped step."""
        self.teardown()
        own = module.lr_scheduler_step

        def lr_scheduler_step(scheduler: Any, metric: Any) -> None:
            for config in module.trainer.lr_scheduler_configs:
                if config.scheduler is scheduler and config.interval == "step":
                    optimizer = getattr(scheduler, "optimizer", None)
                    if optimizer is not None and self._skipped(optimizer):
                        return
            own(scheduler, metric)

        module.lr_scheduler_step = lr_scheduler_step
        self._gated = module

    def teardown(self) -> None:
        """Carry out the last update, and undo the change of the module."""
        if isinstance(self.scaler, GradScaler):
            self.scaler.get_scale()
        if self._gated is not None:
            vars(self._gated).pop("lr_scheduler_step", None)
            self._gated = None
        super().teardown()


class FabricMixedPrecision(_OfFabric):  # type: ignore[misc]
    """Fabric's plugin for "16-mixed", with a scaler of Buoy.

    `fabric.clip_gradients` works with fused optimizers, and does not raise at an
    overflow: it returns a norm of 0, clips nothing, and the step is skipped.  LBFGS
    works.  The arguments are those of `MixedPrecision`.
    """

    def __init__(
        self,
        precision: Mixed = "16-mixed",
        device: str | None = None,
        scaler: Scaler | None = None,
        *,
        policy: str | Policy | None = None,
        **options: Any,
    ) -> None:
        device = device or _device()
        chosen = _scaler(precision, device, scaler, policy, options)
        super().__init__(precision, device, chosen)

    def optimizer_step(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        """Step unless the gradients overflowed."""
        if self.scaler is None:
            return super().optimizer_step(optimizer, **kwargs)
        result = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return result

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Unscale, also for a fused optimizer."""
        if self.scaler is not None:
            self.scaler.clip_grad_norm_(optimizer, math.inf)
            self.scaler.unscale_(optimizer)

    def main_params(self, optimizer: Optimizer) -> Iterator[torch.nn.Parameter]:
        """Return the parameters to clip; none if their step will be skipped."""
        if self.scaler is not None:
            found = self.scaler._found_inf_per_device(optimizer)
            if any(flag.item() for flag in found.values()):
                return iter(())
        params: Iterator[torch.nn.Parameter] = super().main_params(optimizer)
        return params

    def teardown(self) -> None:
        """Carry out the last update."""
        if self.scaler is not None:
            self.scaler.get_scale()
        super().teardown()


class LogScale(_Callback):  # type: ignore[misc]
    """A callback that logs `buoy/scale`, `buoy/skipped` and `buoy/norm`.

    It does nothing if the trainer's plugin has no scaler of Buoy.  Pass `trace=` to
    `MixedPrecision` to record the run in a file.
    """

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, *_: object, **__: object
    ) -> None:
        """Log the last step."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if isinstance(scaler, GradScaler):
            pl_module.log_dict(metrics(scaler))
