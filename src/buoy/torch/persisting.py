"""The part of a scaler that is saved and loaded: as a plain dict, and as a pickle."""

from collections import deque
from typing import Any

from buoy.torch import misuse, saved, traced, verdicts
from buoy.torch.diagnosing import Diagnosing
from buoy.torch.errors import EmptyStateError, MidIterationError
from buoy.torch.joins import Joining
from buoy.torch.mailbox import Mailbox
from buoy.torch.shares import Shares

__all__ = ["Persisting"]

_LOSSES = 64  # of one iteration that are kept, should a verdict need them


class Persisting(Joining, Diagnosing):
    """Torch's five entries, and what lies beyond them."""

    def _begin(self) -> None:
        """Set up what a copy or a loaded scaler starts afresh."""
        self._losses, self._scalings = deque(maxlen=_LOSSES), 0
        self._history = deque(maxlen=verdicts.HISTORY)
        self._frozen = self._inverted = None
        self._guide = misuse.Guide()
        self._reports = {}
        self._noted = self._traced = traced.NOTHING
        self._traced_loss = self._untold = self._recorder = None
        self._listeners = []
        self._assumed, self._healing, self._gap = False, None, None
        self._shares = Shares()
        self._mail = Mailbox(every=min(self._watch.patience, 16))

    def _get_growth_tracker(self) -> int:
        return saved.growth_tracker(self, super()._get_growth_tracker)

    def state_dict(self) -> dict[str, Any]:
        """Give the state as a plain dict: torch's five entries, and the policy's own.

        With torch's rule it is exactly torch's.  Call it after `update`.

        Example:
            >>> import buoy.torch
            >>> buoy.torch.GradScaler("cpu").state_dict()["scale"]
            65536.0
        """
        if not self._enabled:
            return {}
        return {**super().state_dict(), **saved.beyond(self)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state of this class or of `torch.amp.GradScaler`.

        May be called before or after first use.
        """
        if self._enabled and len(state_dict) == 0:
            message = (
                "The source state dict is empty, possibly because it was saved from a "
                "disabled instance of GradScaler. Start this one without loading, or "
                "save from a run whose scaler was enabled."
            )
            raise EmptyStateError(message)
        super().load_state_dict(state_dict)
        if self._enabled:
            saved.load_beyond(self, state_dict)

    def __getstate__(self) -> dict[str, Any]:
        if self._enabled and len(self._per_optimizer_states) != 0:
            message = (
                "A GradScaler instance may only be pickled at the beginning of an "
                "iteration, or at the end after scaler.update(). Between them it holds "
                "findings about gradients that are not part of it."
            )
            raise MidIterationError(message)
        return saved.pickled(super().__getstate__())

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved.unpickled(self, state)
