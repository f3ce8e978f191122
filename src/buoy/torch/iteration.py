"""The losses and counters of a scaler's current iteration."""

from collections import deque
from typing import Any

import torch

from buoy._backends import torch as backend
from buoy.torch.loss_check import LOSS, LossCheck
from buoy.torch.scale import Measured, Number

__all__ = ["Iteration"]

_LOSSES = 64  # of one iteration that are kept, for its verdict


class Iteration:
    """The losses and counters of a scaler's current iteration."""

    def __init__(self, *, checks_loss: bool = False) -> None:
        self.losses: deque[Number] = deque(maxlen=_LOSSES)
        self.loss_check = LossCheck() if checks_loss else None
        self.scalings = 0  # losses that were scaled
        self.ever_scaled = False  # there was one, in this iteration or before
        self.deferred = False  # `update` was called, and waits: `features.managed`
        self.assumed = False  # the scale was created without a loss on this rank
        self.in_schedule = False  # losses are scaled inside a pipeline's schedule
        # For compiled steps, as tensors: see `features.compiled`.
        self.compiled_losses: tuple[torch.Tensor, ...] = ()
        self.compiled_surveys: tuple[Any, ...] = ()
        self.compiled_steps: tuple[Any, ...] = ()

    def add_loss(self, loss: torch.Tensor) -> bool:
        """Keep a loss that is about to be scaled; return whether it has a value."""
        self.scalings += 1
        self.assumed = False
        self.ever_scaled = True
        noted = backend.value_or_copy(loss) if loss.numel() == 1 else None
        if self.loss_check is not None:
            self.loss_check.add(loss, noted)
        if noted is not None:
            self.losses.append(noted)
        return noted is not None

    def findings(self, home: torch.device) -> Measured:
        """Return what the policy wants to know about the losses."""
        number = None if self.loss_check is None else self.loss_check.number(home)
        return {} if number is None else {LOSS: number}

    def end(self) -> None:
        """Begin a new iteration."""
        self.scalings = 0
        self.deferred = False
        self.forget_losses()

    def forget_losses(self) -> None:
        """Forget the losses, after an update or for a state of another run."""
        self.losses.clear()
        if self.loss_check is not None:
            self.loss_check.clear()
