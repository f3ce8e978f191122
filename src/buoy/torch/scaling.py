"""Multiply everything in a nest of outputs, copying the scale to each device once."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from buoy.torch.errors import LossTypeError

if TYPE_CHECKING:
    from buoy.torch.scaler import GradScaler

__all__ = ["scaled"]


def scaled(scaler: "GradScaler", outputs: Any) -> Any:
    """Scale tensors in lists, tuples and other iterables; those stay what they are."""
    if isinstance(outputs, torch.Tensor):
        return scaler.scale(outputs)
    if isinstance(outputs, (str, bytes, dict)) or not isinstance(outputs, Iterable):
        raise _refused(outputs)
    if isinstance(outputs, (list, tuple)):
        parts = [scaled(scaler, part) for part in outputs]
        kind: Any = type(outputs)
        return kind._make(parts) if hasattr(kind, "_make") else kind(parts)
    return (scaled(scaler, part) for part in outputs)


def _refused(outputs: Any) -> LossTypeError:
    message = (
        "outputs must be a Tensor or an iterable of Tensors, got "
        f"{type(outputs).__name__} {outputs!r:.60}. A number has no graph to run "
        "backward through: pass the loss itself, not `loss.item()`; of a dict pass "
        "the values that are losses."
    )
    return LossTypeError(message)
