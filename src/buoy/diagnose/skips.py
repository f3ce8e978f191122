"""Attribute skipped steps during training."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from buoy.diagnose.attribute import first_nonfinite
from buoy.diagnose.culprit import Culprit
from buoy.diagnose.rehearse import RngState, rng_state
from buoy.diagnose.save import save_batch
from buoy.torch import GradScaler

__all__ = ["ExplainSkips"]

log = logging.getLogger("buoy.diagnose")


class ExplainSkips:
    """Re-run the batch of a skipped step, to find what overflowed.

    `run` calls the given function and remembers it.  If the step is skipped, `update`
    runs the batch again under hooks, with the same random numbers and at the same
    scale.  The result is logged (logger `buoy.diagnose`), kept in `culprits`, and saved
    with the batch if `folder` is given.  Training continues unchanged: an error in the
    second run or in saving is logged, not raised.

    Args:
        scaler: a `buoy.torch.GradScaler`.
        model: the model that contains the modules.
        limit: how many skips to explain; the first are the most useful.
        folder: where to save the skipped batches; None saves none.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> scaler = GradScaler("cpu", init_scale=2.0**127)
        >>> skips = ExplainSkips(scaler, model)
        >>> def forward_backward(x):
        ...     scaler.scale(1e3 * model(x).sum()).backward()
        >>> skips.run(forward_backward, torch.ones(4, 2))
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> skips.culprits[0].direction
        'backward'
    """

    def __init__(
        self,
        scaler: GradScaler,
        model: torch.nn.Module,
        *,
        limit: int = 10,
        folder: str | Path | None = None,
    ) -> None:
        self.culprits: list[Culprit | None] = []
        self._scaler, self._model = scaler, model
        self._left, self._folder = limit, folder
        self._kept: tuple[Callable[..., Any], tuple[Any, ...], RngState] | None = None
        self._updates = 0
        scaler.gate(self._after_update, advance_on="attempted")

    def run(self, step_fn: Callable[..., Any], *batch: Any) -> Any:
        """Call `step_fn(*batch)`, remembering it until the next update."""
        if self._left > 0:
            self._attempt(lambda: self._keep(step_fn, batch), "kept")
        return step_fn(*batch)

    def _keep(self, step_fn: Callable[..., Any], batch: tuple[Any, ...]) -> None:
        self._kept = (step_fn, batch, rng_state())

    def _after_update(self) -> None:
        self._updates += 1
        kept, self._kept = self._kept, None
        if kept is not None:
            self._attempt(lambda: self._explain(*kept), "explained")

    def _explain(
        self, step_fn: Callable[..., Any], batch: tuple[Any, ...], rng: RngState
    ) -> None:
        last = self._scaler.last_step
        if last is None or last.applied:
            return
        self._left -= 1
        culprit = first_nonfinite(
            self._model, lambda: step_fn(*batch), scale=last.scale, rng=rng
        )
        self.culprits.append(culprit)
        said = "Run again, this batch is finite." if culprit is None else culprit
        log.warning("Update %d was skipped. %s", self._updates, said)
        if self._folder is not None:
            path = Path(self._folder) / f"step-{self._updates}.pt"
            self._attempt(lambda: self._save(path, batch, rng, culprit), "saved")

    def _save(
        self, path: Path, batch: tuple[Any, ...], rng: RngState, culprit: Culprit | None
    ) -> None:
        save_batch(path, batch, rng=rng, culprit=culprit, step=self._updates)
        log.warning("The batch of update %d was saved as %s.", self._updates, path)

    def _attempt(self, act: Callable[[], None], what: str) -> None:
        """Do something that training must not end for; log why it failed."""
        try:
            act()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - Ctrl-C is the user's
            log.warning(
                "The batch of update %d could not be %s, and training continues: %s: "
                "%s",
                self._updates + (what == "kept"),
                what,
                type(error).__name__,
                error,
            )
