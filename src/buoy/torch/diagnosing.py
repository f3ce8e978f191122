"""The doors of a scaler that lead to `buoy.diagnose`.

That room stands on this one, so it is opened when somebody knocks: nothing here is
imported from it, and nothing of it is loaded before.
"""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["Diagnosing"]


def _room(name: str) -> "ModuleType":
    return import_module(f"buoy.diagnose.{name}")


class Diagnosing:
    """Measure and examine, on demand."""

    def measure_underflow(
        self,
        step_fn: Callable[[], Any],
        *,
        model: torch.nn.Module | None = None,
        activations: bool = False,
        scale: float | None = None,
    ) -> Any:
        """Measure which share of the gradient values is lost at the present scale.

        Runs the forward and backward pass of one batch twice, as it is and in FP32,
        and compares value by value; training does not notice.

        Args:
            step_fn: the forward and backward pass of a batch, or a function that
                returns its loss; it is stopped before it unscales or steps.
            model: whose gradients to look at; the scaler's own if not given.
            activations: whether to look at the gradients at every module's output too.
            scale: another scale than the present one.

        Returns:
            A `buoy.diagnose.Underflow`.

        Example:
            >>> import buoy.torch
            >>> layer = torch.nn.Linear(4, 1)
            >>> scaler = buoy.torch.GradScaler("cpu", model=layer, init_scale=1.0)
            >>> def loss():
            ...     with torch.autocast("cpu", torch.float16):
            ...         return layer(torch.ones(8, 4)).float().mean() * 1e-8
            >>> scaler.measure_underflow(loss).zero
            1.0
            >>> scaler.measure_underflow(loss, scale=2.0**16).zero
            0.0
        """
        return _room("underflow").measure_underflow(
            self, step_fn, model=model, activations=activations, scale=scale
        )

    def doctor(self) -> Any:
        """Watch what trains inside a `with` block, and say what is wrong with it.

        Returns:
            A `buoy.diagnose.Doctor`: after the block, print it or read `findings`.

        Example:
            >>> import buoy.torch
            >>> with buoy.torch.GradScaler("cpu").doctor() as doctor:
            ...     pass  # some steps of training
            >>> print(doctor)
            No optimizer took a step: there was nothing to watch.
        """
        return _room("doctor").Doctor()
