"""How much of the gradients FP16 loses, measured against an FP32 backward pass.

The passes of one batch run twice, as they are and in FP32, at the same scale and with
the same random numbers.  A value that FP32 has and that is zero, or below FP16's
smallest normal number, in the run as it is, is counted.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from buoy._core.errors import OptionError
from buoy.diagnose.hooks import base_of
from buoy.diagnose.rehearse import StepFn, kept_aside, rehearse
from buoy.diagnose.shadow import in_full_precision
from buoy.diagnose.shares import Share, Underflow, joined, summed
from buoy.torch import GradScaler

__all__ = ["measure_underflow"]

_NORMAL = 2.0**-14  # FP16's smallest number with all its digits
Call = tuple[str, int]  # a module's name, and the number of its output


def measure_underflow(
    scaler: GradScaler,
    step_fn: StepFn,
    *,
    model: torch.nn.Module | None = None,
    activations: bool = False,
    scale: float | None = None,
) -> Underflow:
    """Measure what a step's backward pass loses at the present scale.

    See `GradScaler.measure_underflow`.
    """
    if model is None and scaler.is_enabled():
        model = scaler._names.model
    if model is None:
        message = (
            "`measure_underflow` needs the model whose gradients it measures. Pass "
            "`model=`, or give the scaler its model: `GradScaler(..., model=model)`."
        )
        raise OptionError(message)

    used = scaler.get_scale() if scale is None else scale
    halves = _Half(model)
    with kept_aside(model), halves.watching(activations=activations):
        rehearse(step_fn, scale=used)
        halves.note_parameters()
    if not halves.kept:
        message = (
            f"`step_fn` left no gradient in any parameter of the {type(model).__name__}"
            ", so nothing could be measured. Pass the model that it runs as `model=`, "
            "and let it call `backward` or return the loss."
        )
        raise OptionError(message)

    truth = _Truth(model, halves)
    watching = truth.watching(activations=activations)
    with kept_aside(model), in_full_precision(model), watching:
        _run_in_full(step_fn, used)
        truth.note_parameters()
    return summed(used, truth.parameters, truth.activations)


def _run_in_full(step_fn: StepFn, scale: float) -> None:
    try:
        rehearse(step_fn, scale=scale)
    except RuntimeError as error:
        if "dtype" not in str(error) and "same type" not in str(error):
            raise
        message = (
            "The step could not be run in FP32 for comparison, because it casts to "
            f"FP16 itself ({error}). Leave casting to `torch.autocast`, or use the "
            "estimate from a trace."
        )
        raise OptionError(message) from error


class _Watcher(ABC):
    """Sees every gradient of a run: the parameters', and those at modules' outputs."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self._calls: dict[str, int] = {}

    @contextmanager
    def watching(self, *, activations: bool) -> Iterator[None]:
        """Watch the outputs of all modules, if `activations` are asked for."""
        with ExitStack() as stack:
            for name, module in self.model.named_modules():
                if activations and name:
                    hook = partial(self._leave, name)
                    stack.callback(module.register_forward_hook(hook).remove)
            yield

    def note_parameters(self) -> None:
        for name, param in self.model.named_parameters():
            if param.grad is not None:
                self.note_parameter(name, param.grad)

    def _leave(
        self, name: str, module: torch.nn.Module, args: object, output: object
    ) -> None:
        del module, args
        for tensor in pytree.tree_leaves(output):
            if not isinstance(tensor, torch.Tensor) or not tensor.requires_grad:
                continue
            call = self._calls.get(name, -1) + 1
            self._calls[name] = call
            # A view that is changed in place, by the next module, forgets hooks.
            base = base_of(tensor)
            whole: Any = base if base.numel() == tensor.numel() else tensor
            whole.register_hook(partial(self.note_activation, (name, call)))

    @abstractmethod
    def note_parameter(self, name: str, grad: torch.Tensor) -> None:
        """Keep what is needed of a parameter's gradient."""

    @abstractmethod
    def note_activation(self, key: Call, grad: torch.Tensor) -> None:
        """Keep what is needed of an activation's gradient, by module and call."""


class _Half(_Watcher):
    """The run as it is: keeps, of each value, only whether it is lost."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.kept: dict[str | Call, torch.Tensor] = {}

    def note_parameter(self, name: str, grad: torch.Tensor) -> None:
        self.kept[name] = _fate(grad)

    def note_activation(self, key: Call, grad: torch.Tensor) -> None:
        self.kept[key] = _fate(grad)


class _Truth(_Watcher):
    """The run in FP32: counts what there was to lose, and what was lost."""

    def __init__(self, model: torch.nn.Module, halves: _Half) -> None:
        super().__init__(model)
        self._halves = halves
        self.parameters: dict[str, Share] = {}
        self.activations: dict[str, Share] = {}

    def note_parameter(self, name: str, grad: torch.Tensor) -> None:
        fate = self._halves.kept.get(name)
        if fate is not None:
            self.parameters[name] = _share(grad, fate)

    def note_activation(self, key: Call, grad: torch.Tensor) -> None:
        fate = self._halves.kept.get(key)
        if fate is None or fate.shape != grad.shape:
            return
        name, _ = key
        share = _share(grad, fate)
        if name in self.activations:
            share = joined([self.activations[name], share])
        self.activations[name] = share


_SUBNORMAL = 1
_ZERO = 2


def _fate(grad: torch.Tensor) -> torch.Tensor:
    """Mark each value that is lost: 2 zero, 1 subnormal, 0 neither.  int8."""
    sizes = _dense(grad).abs()
    # A zero is below the smallest normal number, too: 1 and 1 make 2.
    return (sizes < _NORMAL).to(torch.int8) + (sizes == 0).to(torch.int8)


def _share(grad: torch.Tensor, fate: torch.Tensor) -> Share:
    """Count what was lost of the values that are not 0 in FP32."""
    there = _dense(grad) != 0
    return Share.of(
        int(there.sum().item()),
        int((there & (fate == _ZERO)).sum().item()),
        int((there & (fate == _SUBNORMAL)).sum().item()),
    )


def _dense(grad: torch.Tensor) -> torch.Tensor:
    return (grad.to_dense() if grad.is_sparse else grad).detach()
