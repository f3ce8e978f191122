"""What is compared: no FP16, no scaling, fixed scales, torch's rule and Buoy's."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from buoy._core.policies.policy import Policy
from buoy._core.policies.registry import policy
from buoy._core.policies.static import Static
from buoy._core.watch import Stuck
from buoy.torch import GradScaler

__all__ = ["COLUMNS", "Column", "column_of"]


@dataclass(frozen=True, slots=True)
class Column:
    """One way to train: a name, words for it, and what scales the loss."""

    name: str
    words: str
    policy: Policy | None = None  # None is FP32, or torch's own scaler
    narrow: bool = True  # in FP16

    def scaler(self, on_stuck: Callable[[Stuck], None]) -> torch.amp.GradScaler:
        """Make what scales the loss."""
        if self.policy is not None:
            return GradScaler("cpu", policy=self.policy, on_stuck=on_stuck)
        return torch.amp.GradScaler("cpu", enabled=self.narrow)


def column_of(spec: str, chosen: Policy) -> Column:
    """Make a column for a policy that was given by name."""
    return Column(spec, f"FP16 with `{spec}`", chosen)


_ALL = (
    Column("fp32", "FP32, what the others should reach", narrow=False),
    Column("none", "FP16 without scaling", policy("none")),
    Column("static 2^7", "FP16, scale fixed at 128", Static(init_scale=2.0**7)),
    Column("static 2^16", "FP16, scale fixed at 65536", Static(init_scale=2.0**16)),
    Column("static 2^32", "FP16, scale fixed at 4.3e9", Static(init_scale=2.0**32)),
    Column("torch", "FP16 with torch.amp.GradScaler, default settings"),
    Column("buoy", "FP16 with Buoy's Headroom, default settings", policy("headroom")),
)

COLUMNS: dict[str, Column] = {column.name: column for column in _ALL}
"""All ways to train, by name, in the order of the page."""
