"""Train one workload in one way with one seed, and note every step.

Weights are FP32 masters.  In FP16 each step casts them, and the inputs, to
torch.float16: all products and activations, forward and backward, are FP16 tensors;
the loss is FP32.  Where a workload says "emulated", `buoy.emulate` takes their place.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call

from buoy._backends.torch.exponents import exponents
from buoy._core.verdicts import Verdict
from buoy.demo.columns import Column
from buoy.demo.workloads import Forward, Workload
from buoy.emulate import LOSSES, emulate
from buoy.torch import GradScaler
from buoy.trace import Row
from buoy.trace.counts import Counts, Shot

__all__ = ["Outcome", "train"]

_SHOTS = 20  # looks at where the gradients lie, in one run
_ASK = 16  # steps between two looks at whether to stop


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one training."""

    workload: str
    column: str
    seed: int
    score: float
    steps: int  # taken; fewer than asked for if it was stopped
    skipped: int
    finished: bool
    seconds: float
    stuck: str = ""  # in the scaler's words
    rows: list[Row] = field(default_factory=list)
    shots: list[Shot] = field(default_factory=list)


def train(
    workload: Workload,
    column: Column,
    seed: int,
    steps: int,
    stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Train, and judge the FP32 weights in FP32."""
    began = time.perf_counter()
    between_looks = max(1, steps // _SHOTS)
    with _seeded(seed) as source:
        run = Run(workload, column, source, steps)
        for step in range(steps):
            if step % _ASK == 0 and stop():
                break
            run.step(step, look=step % between_looks == 0)
        with torch.no_grad():
            score = run.task.score(run.task.net)
    return Outcome(
        workload=workload.name,
        column=column.name,
        seed=seed,
        score=score,
        steps=len(run.rows),
        skipped=sum(not row.applied for row in run.rows),
        finished=len(run.rows) == steps,
        seconds=time.perf_counter() - began,
        stuck=run.stuck,
        rows=run.rows,
        shots=run.shots,
    )


@contextmanager
def _seeded(seed: int) -> Iterator[torch.Generator]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield torch.Generator().manual_seed(1000 + seed)


class Run:
    """A running training."""

    def __init__(
        self, workload: Workload, column: Column, source: torch.Generator, steps: int
    ) -> None:
        self.task = workload.make(source, steps)
        self.stuck = ""
        self.rows: list[Row] = []
        self.shots: list[Shot] = []
        self._weights = dict(self.task.net.named_parameters())
        params = self._weights.values()
        # The usual eps would hide gradients that are too small.
        self._optimizer = torch.optim.Adam(params, workload.lr, eps=1e-15, fused=True)
        self._scaler = column.scaler(self._note)
        self._real = column.narrow and workload.precision == "fp16"
        self._emulated = column.narrow and not self._real

    def _note(self, stuck: object) -> None:
        self.stuck = str(stuck)

    def step(self, number: int, *, look: bool) -> None:
        """Take one step of a usual training loop, and record its outcome."""
        self._optimizer.zero_grad()
        net = self.task.net
        forward = _in_fp16(net, self._weights) if self._real else net
        with emulate("fp16", keep=LOSSES) if self._emulated else nullcontext():
            loss = self.task.loss(number, forward)
            torch.autograd.backward(self._scaler.scale(loss))
        scale = self._scaler.get_scale()
        params = self._weights.values()
        grads = [param.grad for param in params if param.grad is not None]
        if look:
            self.shots.append(Shot(number, scale, self._counts(grads)))
        largest = torch.cat([grad.flatten() for grad in grads]).abs().amax().item()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self.rows.append(self._row(number, scale, largest / scale, loss.item()))

    def _counts(self, grads: list[Tensor]) -> dict[str, Counts]:
        bins = exponents(grads, 0).tolist()
        return {
            name: Counts.of_exponents(found, grad.numel())
            for name, found, grad in zip(self._weights, bins, grads, strict=True)
        }

    def _row(self, number: int, scale: float, amax: float, loss: float) -> Row:
        applied = math.isfinite(amax) or not self._scaler.is_enabled()
        verdict = Verdict.APPLIED if applied else Verdict.SCALE_TOO_HIGH
        if isinstance(self._scaler, GradScaler) and not applied:
            verdict = self._scaler.last_step.verdict  # type: ignore[union-attr]
        return Row(
            step=number,
            scale=scale,
            applied=applied,
            verdict=verdict,
            amax=amax,
            loss=loss,
            time=time.time(),
        )


def _in_fp16(net: nn.Module, masters: dict[str, nn.Parameter]) -> Forward:
    weights = {name: master.half() for name, master in masters.items()}

    def forward(x: Tensor) -> Tensor:
        x = x.half() if x.is_floating_point() else x
        result: Tensor = functional_call(net, weights, (x,))
        return result.float()

    return forward
