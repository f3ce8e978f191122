"""Feed a recorder from a scaler, without asking the device for anything.

On a CPU the numbers are looked at where they lie.  Elsewhere they stay on the device
and travel to the host sixteen steps at a time (`Mailbox`); rows are written when they
have arrived.
"""

import math
import os
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from buoy._core.codec import encode
from buoy._core.errors import BuoyError
from buoy._core.state import Verdict
from buoy.torch import survey
from buoy.torch.exponents import BINS, exponents
from buoy.torch.gather import Gathered, owners
from buoy.torch.mailbox import Letter, Mailbox
from buoy.torch.rule import Evidence
from buoy.torch.step import LastStep
from buoy.trace.counts import Counts
from buoy.trace.record import Recorder

if TYPE_CHECKING:
    from buoy.torch.report import Reporting

__all__ = ["SELDOM", "Tap", "record"]

_LETTERS = 16  # steps that travel together
_CHEAP = 2**20  # gradients whose size is measured at every step
SELDOM = 64  # steps between two measurements of many more

Number = float | torch.Tensor


def record(
    scaler: "Reporting", trace: str | os.PathLike[str] | Recorder
) -> Recorder | None:
    """Let a scaler's run be recorded; on rank 0 only."""
    rank, world = _rank()
    if rank:
        return None
    recorder = trace if isinstance(trace, Recorder) else Recorder(trace)
    recorder.describe(rank=rank, world=world, **_about(scaler))
    scaler.listen(Tap(recorder))
    return recorder


def _rank() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    found = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE")]
    rank, world = (int(x) if x.isdecimal() else 0 for x in found)
    return rank, max(world, 1)


def _about(scaler: "Reporting") -> dict[str, Any]:
    about: dict[str, Any] = {"torch": torch.__version__, "device": scaler._device}
    model = scaler._names.model
    if model is not None:
        about["model"] = type(model).__name__
        about["parameters"] = sum(p.numel() for p in model.parameters())
    policy = scaler.policy
    about["policy"] = type(policy).__name__
    try:
        about["policy_settings"] = encode(policy)
    except BuoyError:  # of somebody's own making
        about["policy_settings"] = repr(policy)
    return about


class _Note(NamedTuple):
    """What the host knew when a letter was posted."""

    step: int
    time: float
    known: tuple[bool, ...]  # which of norm, amax, loss were measured
    verdict: Verdict | None
    offenders: tuple[str, ...]
    parts: Any  # owners and norms, to name the culprits by
    names: Any  # (optimizer, owners) -> names


class Tap:
    """Looks at each step and passes it on; a failure here ends the recording only."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._post = _Post(recorder)
        self._seen: list[tuple[tuple[str, ...], list[int], torch.Tensor]] = []
        self._failed = False
        self._end = weakref.finalize(self, _Post.drain, self._post)
        recorder.attach(self._post.drain)

    def look(
        self,
        scaler: Any,
        optimizer: Any,
        record: dict[str, Any],
        gathered: Gathered,
    ) -> None:
        """Measure what nobody has measured, seldom enough to cost little."""
        if self._failed or not gathered.grads or torch.compiler.is_compiling():
            return
        try:
            with torch.no_grad():
                self._measure(scaler, record, gathered)
                if self._recorder.due(scaler._turn):
                    held = owners(optimizer)
                    self._seen.append(
                        (
                            scaler._names.of(optimizer, held),
                            [grad.numel() for grad in gathered.grads],
                            exponents(gathered.grads, scaler._turn),
                        )
                    )
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            self._fail(error)

    def _measure(self, scaler: Any, record: dict[str, Any], gathered: Gathered) -> None:
        size = sum(map(torch.Tensor.numel, gathered.grads))
        if size > _CHEAP and scaler._turn % SELDOM:
            return
        one = torch.ones((), dtype=torch.float32, device=scaler._home())
        if "amax" not in record:
            record["seen_amax"] = survey.largest(gathered, one).amax
        # Of gradients that ranks share one alone cannot take the norm.
        if "norm" not in record and not scaler._ranks.groups():
            record["seen_norm"] = survey.measure(gathered, 2.0, one).norm

    def concluded(
        self, scaler: Any, stepped: list[LastStep], evidence: Evidence | None
    ) -> None:
        """Pass the step on."""
        if self._failed or not stepped or torch.compiler.is_compiling():
            return
        try:
            self._pass_on(scaler, stepped, evidence)
        except Exception as error:  # noqa: BLE001
            self._fail(error)

    def _pass_on(
        self, scaler: Any, stepped: list[LastStep], evidence: Evidence | None
    ) -> None:
        outcomes = [report._applied for report in stepped]
        finite = None if None in outcomes else all(outcomes)
        bad = [report for report in stepped if report._applied is False]
        report = bad[0] if bad else stepped[-1]
        found = report.found if evidence is None else evidence.found
        if report._spike is not None:  # of which the evidence says nothing
            found = report.found
        scale = report._scale
        norm, amax = self._sizes(scaler, scale)
        loss = scaler._losses[-1] if scaler._losses else None
        note = _Note(
            step=scaler._turn - 1,
            time=time.time(),
            known=(norm is not None, amax is not None, loss is not None),
            verdict=report.verdict if finite is False else None,
            offenders=report.offenders if finite is False else (),
            parts=report._parts,
            names=scaler._names.of,
        )
        flag = 0.0 if finite else found if finite is None else 1.0
        self._post.step([flag, scale, norm, amax, loss], note, scaler._home())
        if self._seen:
            self._post.shot(scaler._turn - 1, scale, self._seen)
            self._seen = []

    def _sizes(self, scaler: Any, scale: Number) -> tuple[Number | None, Number | None]:
        """Put several optimizers' norms (unscaled) and sizes (scaled) together."""
        records = scaler._per_optimizer_states.values()
        norms = [r["norm"] for r in records if "norm" in r]
        norms += [r["seen_norm"] / scale for r in records if "seen_norm" in r]
        sizes = [r.get("amax", r.get("seen_amax")) for r in records]
        sizes = [size for size in sizes if size is not None]
        norm = norms[0] if norms else None
        if len(norms) > 1:
            norm = torch.linalg.vector_norm(torch.stack(norms))
        amax = sizes[0] if sizes else None
        if len(sizes) > 1:
            amax = torch.stack(sizes).max()
        return norm, amax

    def _fail(self, error: Exception) -> None:
        self._failed = True
        self._recorder.complain(
            f"recording has stopped: {type(error).__name__}: {error}. Training goes on"
        )


class _Post:
    """Numbers on their way from the device to the recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._rows = Mailbox(every=_LETTERS)
        self._shots = Mailbox(every=1)
        self._parts = Mailbox(every=1)

    def step(
        self, numbers: list[Number | None], note: _Note, home: torch.device
    ) -> None:
        """Record a step: at once if the host sees its numbers, else when they come."""
        plain = [_plain(number) for number in numbers]
        if None not in plain:
            self._write([x for x in plain if x is not None], note)
            return
        vector = [_tensor(number, home) for number in numbers]
        self._rows.post(torch.stack(vector), note)
        self._collect()

    def shot(self, step: int, scale: Number, seen: list[Any]) -> None:
        """Record histograms; the thread that writes will sort them out."""
        names = [name for some, _, _ in seen for name in some]
        sizes = [size for _, some, _ in seen for size in some]
        counted = torch.cat([counts.flatten().float() for _, _, counts in seen])
        vector = torch.cat([counted, _tensor(scale, counted.device).reshape(1)])
        # On a CPU this arrives at once.
        self._shots.post(vector, (step, names, sizes))
        self._collect()

    def drain(self) -> None:
        """Wait for everything that is on its way."""
        self._take(self._rows.empty(), self._shots.empty())
        for letter in self._parts.empty():
            self._accuse(letter)

    def _collect(self) -> None:
        self._take(self._rows.collect(), self._shots.collect())
        for letter in self._parts.collect():
            self._accuse(letter)

    def _take(self, rows: list[Letter], shots: list[Letter]) -> None:
        for numbers, note in rows:
            self._write(numbers, note)
        for numbers, (step, names, sizes) in shots:
            self._recorder.histograms(
                step, numbers[-1], partial(_sorted, numbers, names, sizes)
            )

    def _write(self, numbers: list[float], note: _Note) -> None:
        flag, scale, *rest = numbers
        norm, amax, loss = (
            x if known else None for x, known in zip(rest, note.known, strict=True)
        )
        skipped, verdict = flag > 0, note.verdict
        if skipped and verdict is None:
            nan = loss is not None and not math.isfinite(loss)
            verdict = Verdict.FORWARD_NONFINITE if nan else Verdict.SCALE_TOO_HIGH
            if note.parts is not None:
                self._parts.post(torch.stack(list(note.parts[1])).float(), note)
        self._recorder.step(
            step=note.step,
            time=note.time,
            scale=scale,
            applied=not skipped,
            verdict=verdict if skipped else None,
            norm=norm,
            amax=None if amax is None else amax / scale,
            loss=loss,
            offenders=note.offenders,
        )

    def _accuse(self, letter: Letter) -> None:
        norms, note = letter
        held = [
            owner
            for reference, norm in zip(note.parts[0], norms, strict=True)
            if not math.isfinite(norm) and (owner := reference()) is not None
        ]
        if held:
            self._recorder.offenders(note.step, note.names(None, held))


def _sorted(
    numbers: list[float], names: list[str], sizes: list[int]
) -> dict[str, Counts]:
    """Sort out the counts of several tensors that travelled in one row."""
    return {
        name: Counts.of_exponents(numbers[i * BINS : (i + 1) * BINS], size)
        for i, (name, size) in enumerate(zip(names, sizes, strict=True))
    }


def _plain(number: Number | None) -> float | None:
    """Tell a number that the host can see; 0 for what was not measured."""
    if number is None:
        return 0.0
    if isinstance(number, torch.Tensor):
        return survey.seen_by_host(number.float().reshape(()))
    return float(number)


def _tensor(number: Number | None, home: torch.device) -> torch.Tensor:
    if isinstance(number, torch.Tensor):
        return number.float().reshape(()).to(home, non_blocking=True)
    value = 0.0 if number is None else float(number)
    return torch.full((), value, dtype=torch.float32, device=home)
