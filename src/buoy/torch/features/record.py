"""Record a scaler's run, without a host read.

The scaler's log makes the rows.  This module adds norms that nothing else measures,
histograms of exponents, and the names of non-finite parameters.  On a CPU these are
available at once; otherwise they are copied to the host without waiting, and recorded
when the copy is complete.
"""

import math
import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch

from buoy._backends import torch as backend
from buoy._backends.torch.exponents import exponents
from buoy._backends.torch.gradients import Gathered
from buoy._backends.torch.inspection import AMAX, inspect
from buoy._backends.torch.names import Names
from buoy._backends.torch.reader import AsyncReader
from buoy._core.codec import encode
from buoy._core.errors import BuoyError
from buoy._core.feed import BINS, feed
from buoy._core.step import Row
from buoy.torch.features import managed
from buoy.torch.features.spikes import Spikes
from buoy.torch.hooks import Extension, Scaler
from buoy.torch.pending import Pending
from buoy.torch.step_log import Entry, StepLog
from buoy.trace import Recorder
from buoy.trace.counts import Counts

__all__ = ["SELDOM", "Record", "record"]

_CHEAP = 2**20  # gradient elements that are measured at every step
SELDOM = 64  # steps between two measurements of larger models
Sizes = list[tuple[str, int]]  # of tensors, by name


def record(scaler: Scaler, trace: str | os.PathLike[str] | Recorder) -> None:
    """Record a scaler's run; on rank 0 only."""
    rank, world = _rank()
    if rank:
        return
    recorder = trace if isinstance(trace, Recorder) else Recorder(trace)
    recorder.describe(rank=rank, world=world, **_description(scaler))
    if scaler._options.managed:
        recorder.attach(managed.flush)
    extension = Record(recorder, scaler._names, scaler._log)
    scaler.attach(extension)
    weakref.finalize(scaler, extension.flush)


def _rank() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    found = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE")]
    rank, world = (int(x) if x.isdecimal() else 0 for x in found)
    return rank, max(world, 1)


def _description(scaler: Scaler) -> dict[str, Any]:
    policy = scaler.policy
    model = scaler._names.model
    try:
        settings: Any = encode(policy)
    except BuoyError:  # a policy of the user
        settings = repr(policy)
    found: dict[str, Any] = {"torch": torch.__version__, "device": scaler._device}
    if model is not None:
        found["model"] = type(model).__name__
        found["parameters"] = sum(p.numel() for p in model.parameters())
    return {**found, "policy": type(policy).__name__, "policy_settings": settings}


def _stop_on_error(method: Callable[..., None]) -> Callable[..., None]:
    """Stop recording after an error, with one warning; training continues."""

    @wraps(method)
    def tried(self: "Record", *args: Any, **kwargs: Any) -> None:
        if self.failed:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - training must continue
            self.failed = True
            why = f"{type(error).__name__}: {error}"
            self.recorder.complain(f"recording has stopped: {why}. Training continues")

    return tried


class Record(Extension):
    """Measures what is recorded, and passes it to the recorder once it is copied."""

    key = "record"

    def __init__(self, recorder: Recorder, names: Names, log: StepLog) -> None:
        self.recorder = recorder
        self.failed = False
        self._names = names
        self._log = log
        self._tensors: Sizes = []  # with a row in `_counts`
        self._counts: list[torch.Tensor] = []  # int32 [tensors, BINS]
        self._reader = AsyncReader(every=1)  # each note is a callback
        log.record = self.row
        log.recorder = recorder
        recorder.attach(self.flush)

    @_stop_on_error
    def inspected(self, scaler: Scaler, pending: Pending) -> None:
        """Measure what nothing else has measured, at a low rate."""
        gathered = pending.gathered
        turn = scaler._loss_scale.turn
        if gathered is None or not gathered.grads:
            return
        sizes = [grad.numel() for grad in gathered.grads]
        with torch.no_grad():
            if sum(sizes) <= _CHEAP or turn % SELDOM == 0:
                _measure(scaler, pending, gathered)
            if self.recorder.due(turn):
                names = self._names.of(pending.optimizer, gathered.params)
                self._tensors += zip(names, sizes, strict=True)
                self._counts.append(exponents(gathered.grads, turn))

    @_stop_on_error
    def updated(self, scaler: Scaler, pendings: list[Pending]) -> None:
        """Record the histograms; the log calls `row`."""
        tensors = self._tensors
        self._tensors = []
        counts = self._counts
        self._counts = []
        outcomes = [one.outcome for one in pendings if one.outcome is not None]
        scales = [one.noted_scale for one in outcomes]
        if counts and scales:
            vector = torch.cat([some.flatten().float() for some in counts])
            end = backend.scalar(scales[-1], vector.device).reshape(1)
            note = partial(self._histograms, scaler._loss_scale.turn - 1, tensors)
            self._reader.post(torch.cat([vector, end]), note)
            self._collect()

    @_stop_on_error
    def row(self, row: Row, entry: Entry) -> None:
        """Record a row; find the offenders of a skip if the row has none."""
        feed(self.recorder, row, entry.time)
        if entry.outcome is not None and not (row.applied or row.offenders):
            clues = entry.outcome.clues
            if len(clues.norms):
                note = partial(self._offenders, row.step, clues.params)
                self._reader.post(torch.stack(list(clues.norms)), note)
        self._collect()

    def flush(self) -> None:
        """Wait for all pending copies, and record them."""
        self._log.collect(wait=True)
        self._collect(wait=True)

    @_stop_on_error
    def _collect(self, *, wait: bool = False) -> None:
        arrived = self._reader.drain() if wait else self._reader.collect()
        for numbers, take in arrived:
            take(numbers)

    def _histograms(self, step: int, tensors: Sizes, numbers: list[float]) -> None:
        """Record histograms; the writer thread splits them by tensor."""
        split = partial(_split, numbers, tensors)
        self.recorder.histograms(step, numbers[-1], split)

    def _offenders(self, step: int, params: Sequence[Any], norms: list[float]) -> None:
        found = [
            param
            for reference, norm in zip(params, norms, strict=True)
            if not math.isfinite(norm) and (param := reference()) is not None
        ]
        if found:
            self.recorder.offenders(step, self._names.of(None, found))


def _measure(scaler: Scaler, pending: Pending, gathered: Gathered) -> None:
    """Measure the norm and the largest gradient, unless done elsewhere."""
    has_norm = pending.survey is not None and pending.survey.norm is not None
    # One rank alone cannot measure the global norm, and the spike guard measures it
    # anyway.
    skip_norm = (
        has_norm or scaler._ranks.several or scaler._hooks.find(Spikes) is not None
    )
    if skip_norm and pending.amax is not None:
        return
    inverse = scaler._placed("step").inverse
    survey = inspect(
        gathered,
        inverse,
        order=None if skip_norm else 2.0,
        wanted=(AMAX,) if pending.amax is None else (),
    )
    if survey.norm is not None:
        pending.norm = survey.norm * inverse
    pending.measured = {**survey.measured, **pending.measured}


def _split(numbers: list[float], tensors: Sizes) -> dict[str, Counts]:
    return {
        name: Counts.of_exponents(numbers[i * BINS : (i + 1) * BINS], size)
        for i, (name, size) in enumerate(tensors)
    }
