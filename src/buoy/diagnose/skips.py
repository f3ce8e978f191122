"""Attribute skipped steps during training."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, TypeVarTuple

import torch

from buoy.diagnose.attribute import first_nonfinite
from buoy.diagnose.culprit import Culprit
from buoy.diagnose.rehearse import RngState, rng_state
from buoy.diagnose.save import save_batch
from buoy.torch import GradScaler

__all__ = ["ExplainSkips"]

log = logging.getLogger("buoy.diagnose")

Batch = TypeVarTuple("Batch")
Result = TypeVar("Result")


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
        self._scaler = scaler
        self._model = model
        self._left = limit
        self._folder = folder
        self._kept: _Kept | None = None
        self._updates = 0
        scaler.gate(self._after_update, advance_on="attempted")

    def run(self, step_fn: Callable[[*Batch], Result], *batch: *Batch) -> Result:
        """Call `step_fn(*batch)`, remembering it until the next update."""
        if self._left > 0:
            with self._continuing("kept", self._updates + 1):
                self._kept = _Kept(step_fn, batch, rng_state())
        return step_fn(*batch)

    def _after_update(self) -> None:
        self._updates += 1
        kept = self._kept
        self._kept = None
        if kept is not None:
            with self._continuing("explained", self._updates):
                self._explain(kept)

    def _explain(self, kept: "_Kept") -> None:
        last = self._scaler.last_step
        if last is None or last.applied:
            return
        self._left -= 1
        culprit = first_nonfinite(
            self._model, kept.again, scale=last.scale, rng=kept.rng
        )
        self.culprits.append(culprit)
        found = "Run again, this batch is finite." if culprit is None else culprit
        log.warning("Update %d was skipped. %s", self._updates, found)
        if self._folder is not None:
            with self._continuing("saved", self._updates):
                self._save(Path(self._folder), kept, culprit)

    def _save(self, folder: Path, kept: "_Kept", culprit: Culprit | None) -> None:
        number = self._updates
        path = folder / f"step-{number}.pt"
        save_batch(path, kept.batch, rng=kept.rng, culprit=culprit, step=number)
        log.warning("The batch of update %d was saved as %s.", number, path)

    @contextmanager
    def _continuing(self, what: str, update: int) -> Iterator[None]:
        """Do something that training must not end for; log why it failed."""
        try:
            yield
        except (Exception, SystemExit) as error:  # noqa: BLE001 - Ctrl-C is the user's
            log.warning(
                "The batch of update %d could not be %s, and training continues: %s: "
                "%s",
                update,
                what,
                type(error).__name__,
                error,
            )


class _Kept(NamedTuple):
    """A batch that may have to be run again."""

    step_fn: Callable[..., object]
    batch: tuple[Any, ...]
    rng: RngState

    def again(self) -> object:
        return self.step_fn(*self.batch)
