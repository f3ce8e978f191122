"""The ranks that share one scale, as the rest of the package sees them."""

from typing import Protocol

import torch

from buoy.torch.iteration import Iteration
from buoy.torch.pending import Pending
from buoy.torch.scale import Scale

__all__ = ["Alone", "Ranks"]


class Ranks(Protocol):
    """Combines the findings of ranks; every method may be a collective."""

    several: bool  # there are other ranks

    def introduce(self, *, foresees: bool, in_schedule: bool) -> None:
        """Compare this scaler with those of the other ranks, once.

        `foresees`: its policy looks at the loss.  `in_schedule`: losses are scaled in a
        pipeline's schedule.
        """

    def agree(self, pending: Pending, scale: Scale, iteration: Iteration) -> None:
        """Replace an optimizer's findings by those of all ranks."""

    def agree_on_norm(
        self,
        pending: Pending,
        scale: Scale,
        iteration: Iteration,
        *,
        order: float,
        doing: str,
        model: torch.nn.Module | None,
    ) -> torch.Tensor | None:
        """The same; return the norm of all ranks' gradients, None if there are none.

        `pending.survey` has this rank's norm.  `doing` names the call, for the error
        that ranks get if they do different things.
        """

    def largest(self, number: torch.Tensor, doing: str) -> torch.Tensor:
        """Return the largest of all ranks' numbers."""

    def largest_loss(
        self, loss: torch.Tensor | None, home: torch.device
    ) -> torch.Tensor | None:
        """Return the largest loss of all ranks; None if no rank has one."""


class Alone:
    """One rank: it returns what it gets."""

    several = False

    def introduce(self, *, foresees: bool, in_schedule: bool) -> None:
        """Nothing to compare: there are no other ranks."""

    def agree(
        self,
        pending: Pending,
        scale: Scale,  # noqa: ARG002
        iteration: Iteration,  # noqa: ARG002
    ) -> None:
        """Keep the findings."""
        pending.agreed = True

    def agree_on_norm(
        self,
        pending: Pending,
        scale: Scale,  # noqa: ARG002
        iteration: Iteration,  # noqa: ARG002
        *,
        order: float,  # noqa: ARG002
        doing: str,  # noqa: ARG002
        model: torch.nn.Module | None,  # noqa: ARG002
    ) -> torch.Tensor | None:
        """Return this rank's norm."""
        pending.agreed = True
        survey = pending.survey
        return None if survey is None or survey.empty else survey.norm

    def largest(self, number: torch.Tensor, doing: str) -> torch.Tensor:  # noqa: ARG002
        """Return the number."""
        return number

    def largest_loss(
        self,
        loss: torch.Tensor | None,
        home: torch.device,  # noqa: ARG002
    ) -> torch.Tensor | None:
        """Return the loss."""
        return loss
