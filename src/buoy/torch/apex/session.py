"""What `amp.initialize` chose, for the calls that follow it."""

from typing import Any

from buoy.torch.apex.levels import Level
from buoy.torch.scaler import GradScaler

__all__ = ["Session"]


class Session:
    """The level, a scaler per loss, and whose steps they decide."""

    def __init__(self) -> None:
        self.begun = False
        self.level: Level | None = None
        self.scalers: list[GradScaler] = []
        self.optimizers: list[Any] = []
        self.delayed: set[int] = set()  # optimizers whose gradients are still scaled
        self.talks = True

    def begin(
        self,
        level: Level | None,
        scalers: list[GradScaler],
        optimizers: list[Any],
        *,
        talks: bool = True,
    ) -> None:
        """Start over."""
        self.begun, self.level, self.talks = True, level, talks
        self.scalers, self.optimizers = scalers, optimizers
        self.delayed = set()
