"""apex.amp's documented functions, on a `GradScaler` per loss.

Levels: O0 is FP32; O1 runs the models' forward passes under autocast; O2 casts models
to FP16, batch norms excepted, and keeps FP32 masters; O3 casts everything.

Left out: patching of torch's functions (autocast does O1's work), the API of before
2019, and apex's own optimizers and layers.
"""

import logging
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from buoy import policy
from buoy.integrations.apex.casts import (
    cast_model,
    disable_casts,
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from buoy.integrations.apex.levels import Level, level
from buoy.integrations.apex.unscaling import Gradients, skip_once
from buoy.torch import CallOrderError, GradScaler, MasterWeights, OptionError
from buoy.torch.features.masters import masters_of

__all__ = [
    "disable_casts",
    "float_function",
    "half_function",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "scalers",
    "state_dict",
]

log = logging.getLogger("buoy.integrations.apex")

_FLOOR = 2.0**-24  # apex has none: a NaN loss takes it to 1e-320 and a division by zero


@dataclass(slots=True)
class _Session:
    """What `initialize` chose, for the calls that follow it."""

    begun: bool = False
    level: Level | None = None  # None: not enabled
    scalers: tuple[GradScaler, ...] = ()  # one per loss
    gradients: tuple[Gradients, ...] = ()  # one per optimizer
    verbose: bool = True

    def gradients_of(self, optimizer: Optimizer) -> Gradients:
        """Return those of an optimizer that `initialize` has seen."""
        for gradients in self.gradients:
            if gradients.optimizer is optimizer:
                return gradients
        message = (
            f"This {type(optimizer).__name__} was not passed through "
            "`amp.initialize`, so nothing would keep its steps safe. Pass all "
            "optimizers to it, in a list, and use what it returns."
        )
        raise OptionError(message)


_now = _Session()


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> Any:
    """Make models and optimizers ready for a level of mixed precision.

    Returns them as they were given: one, or a list.

    Example:
        >>> from buoy.integrations.apex import amp
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
        >>> with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled:
        ...     scaled.backward()
        >>> optimizer.step()
        >>> model.weight.dtype
        torch.float16
    """
    result = models if optimizers is None else (models, optimizers)
    if not enabled:
        _now.begun = True
        _now.level = None
        _now.scalers = ()
        _now.gradients = ()
        return result

    given = {
        "cast_model_type": cast_model_type,
        "patch_torch_functions": patch_torch_functions,
        "keep_batchnorm_fp32": keep_batchnorm_fp32,
        "master_weights": master_weights,
        "loss_scale": loss_scale,
    }
    chosen = level(opt_level, given)
    if verbosity:
        log.info("%s", chosen)

    modules: list[torch.nn.Module] = _listed(models)
    held: list[Optimizer] = _listed(optimizers)
    for model in modules:
        cast_model(model, chosen, cast_model_outputs)
    if chosen.master_weights:
        for optimizer in held:
            if masters_of(optimizer) is None:
                MasterWeights(optimizer, model=modules[0] if modules else None)

    low = _FLOOR if min_loss_scale is None else min_loss_scale
    _now.begun = True
    _now.level = chosen
    _now.verbose = verbosity > 0
    _now.scalers = tuple(
        _scaler(chosen, modules, low, max_loss_scale) for _ in range(num_losses)
    )
    _now.gradients = tuple(map(Gradients, held))
    return result


def _scaler(
    chosen: Level, models: list[torch.nn.Module], low: float, high: float
) -> GradScaler:
    """Make the scaler of one loss."""
    model = models[0] if len(models) == 1 else torch.nn.ModuleList(models)
    device = next((param.device.type for param in model.parameters()), "cpu")
    if chosen.loss_scale == "dynamic":
        rule = policy("apex", min_loss_scale=low, max_loss_scale=high)
    else:
        rule = policy("static", init_scale=float(chosen.loss_scale))
    return GradScaler(device, policy=rule, model=model)


def scale_loss(
    loss: torch.Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: torch.nn.Module | None = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> AbstractContextManager[torch.Tensor]:
    """Yield the scaled loss to call `backward` on; then unscale and check.

    If the gradients are not finite, the next `step` of these optimizers does nothing.
    With `delay_unscale` they stay scaled, for a later pass to add to and unscale.
    """
    del model, delay_overflow_check  # reserved in apex; and done at once
    if not _now.begun:
        message = (
            "Invoked 'with amp.scale_loss', but internal Amp state has not been "
            "initialized. Call `model, optimizer = amp.initialize(model, optimizer"
            ", opt_level=...)` first, once, before the training loop."
        )
        raise CallOrderError(message)
    if _now.level is None:
        return nullcontext(loss)
    if not 0 <= loss_id < len(_now.scalers):
        message = (
            f"`loss_id` is {loss_id}, but `amp.initialize` was given "
            f"{len(_now.scalers)} losses. Pass `num_losses` to it."
        )
        raise OptionError(message)
    held = [_now.gradients_of(optimizer) for optimizer in _listed(optimizers)]
    return _scaled(loss.float(), held, loss_id, delay_unscale=delay_unscale)


@contextmanager
def _scaled(
    loss: torch.Tensor, held: list[Gradients], loss_id: int, *, delay_unscale: bool
) -> Iterator[torch.Tensor]:
    """Yield the scaled loss; then check and unscale the gradients that it made."""
    scaler = _now.scalers[loss_id]
    if delay_unscale:
        yield scaler.scale(loss)
        for gradients in held:
            gradients.scaled = True
        return

    kept = [pair for gradients in held for pair in gradients.set_aside()]
    yield scaler.scale(loss)
    checked = [gradients.check(scaler) for gradients in held]
    scaler.update()
    for param, grad in kept:
        param.grad = grad if param.grad is None else param.grad.add_(grad)

    if all(checked):
        return
    for gradients in held:
        skip_once(gradients.optimizer)
    if _now.verbose:
        log.info(
            "Gradient overflow. Skipping step, loss scaler %d reducing loss scale "
            "to %g",
            loss_id,
            scaler.get_scale(),
        )


def master_params(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Iterate over what the optimizer updates: FP32 masters where there are some.

    Their gradients are the unscaled ones, for clipping.
    """
    masters = masters_of(optimizer)
    for group in optimizer.param_groups:
        for param in group["params"]:
            master = None if masters is None else masters.of(param)
            if master is None:
                yield param
            else:
                master.grad = None if param.grad is None else param.grad.float()
                yield master


def scalers() -> tuple[GradScaler, ...]:
    """Return the scaler behind each loss, for `last_step` and the like; not in apex."""
    return _now.scalers


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return scale and count of clean steps of each loss, under apex's names.

    Example:
        >>> from buoy.integrations.apex import amp
        >>> _ = amp.initialize(torch.nn.Linear(1, 1), opt_level="O1")
        >>> dict(amp.state_dict())
        {'loss_scaler0': {'loss_scale': 65536.0, 'unskipped': 0}}
    """
    saved: dict[str, Any] = OrderedDict() if destination is None else destination
    for index, scaler in enumerate(_now.scalers):
        saved[f"loss_scaler{index}"] = {
            "loss_scale": scaler.get_scale(),
            "unskipped": scaler.state_dict()["_growth_tracker"],
        }
    return saved


def load_state_dict(state_dict: dict[str, Any]) -> None:
    """Load a state that this module or apex has saved."""
    saved = [
        value for name, value in state_dict.items() if name.startswith("loss_scaler")
    ]
    if len(saved) != len(_now.scalers):
        log.warning(
            "The state has %d loss scalers, this run has %d (`num_losses`): those in "
            "common were loaded.",
            len(saved),
            len(_now.scalers),
        )
    for scaler, one in zip(_now.scalers, saved, strict=False):
        ours = scaler.state_dict()
        ours.pop("buoy", None)
        ours["scale"] = float(one["loss_scale"])
        ours["_growth_tracker"] = int(one["unskipped"])
        with warnings.catch_warnings():  # apex saves nothing but these two
            warnings.filterwarnings("ignore", "The loaded state is from policy")
            scaler.load_state_dict(ours)


def _listed(things: Any) -> list[Any]:
    """List what may be given alone, as a list or not at all."""
    if things is None:
        return []
    if isinstance(things, Iterable) and not isinstance(things, torch.nn.Module):
        return list(things)
    return [things]
