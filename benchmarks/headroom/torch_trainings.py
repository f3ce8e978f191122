"""Real FP16 trainings in torch, under `GradScaler`.

    python -m benchmarks.headroom.torch_trainings [NAME ...] [--policy NAME ...]

`torch.autocast` computes forward and backward in float16; the weights of one task are
float16, too, with `fp16_params="master"`.  The tasks are those of `mlp_tasks`; options,
table and bounds are those of `trainings`.
"""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import buoy
from benchmarks.headroom import mlp_tasks
from benchmarks.headroom.bad_batches import INF_LOSS, NAN_GRADIENTS, NAN_LOSS
from benchmarks.headroom.harness import PACKAGE, Trainings, outcome_of
from benchmarks.headroom.judge import EXACT, Outcome
from benchmarks.headroom.mlp_tasks import TASKS, Task
from buoy.torch import GradScaler

__all__ = ["TRAININGS", "judge", "run"]

FACTORS = {NAN_LOSS: float("nan"), INF_LOSS: float("inf")}


class _Raised(torch.autograd.Function):
    """Pass x; its gradient passes a tensor of the same dtype that is larger."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        inside = (grad.float() * ctx.factor).to(grad.dtype)
        return (inside.float() / ctx.factor).to(grad.dtype), None


class _Run:
    """One training: its weights, and the scaler and the optimizer that change them."""

    def __init__(self, task: Task, policy: str | buoy.Policy, seed: int) -> None:
        self.task = task
        exactly = policy == EXACT
        masters = task.half_weights and not exactly
        dtype = torch.float16 if masters else torch.float32
        self.half = not exactly
        self.weights = [
            torch.nn.Parameter(torch.tensor(array, dtype=dtype))
            for layer in mlp_tasks.dense(task, seed)
            for array in layer
        ]
        self.optimizer = torch.optim.Adam(self.weights, task.rate, eps=1e-15)
        self.scaler = GradScaler(
            "cpu",
            policy=buoy.Static(init_scale=1.0) if exactly else policy,
            fp16_params="master" if masters else "error",
            on_stuck=lambda _: None,  # the judge says so
        )

    def loss(
        self, weights: Sequence[Tensor], batch: Sequence[Tensor], *, half: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of a batch, and the outputs."""
        x, y, bits = batch
        with torch.autocast("cpu", torch.float16, enabled=half):
            for i in range(0, len(weights), 2):
                if i:
                    x = torch.tanh(x)
                if i == 2:
                    x = _Raised.apply(x, 2.0 ** float(bits))
                x = torch.nn.functional.linear(x, weights[i].T, weights[i + 1])
        if y.dtype == torch.int64:
            return torch.nn.functional.cross_entropy(x.float(), y), x
        wide = x if half and self.task.half_loss else x.float()
        error = (wide - y.to(wide.dtype)) * self.task.unit
        return error.square().mean(), x

    def step(self, batch: Sequence[Tensor], code: int) -> tuple[Any, ...]:
        """Take a step; return what `outcome_of` wants to know of it."""
        self.optimizer.zero_grad()
        loss, out = self.loss(self.weights, batch, half=self.half)
        if code == NAN_GRADIENTS:
            out.register_hook(lambda grad: grad * float("nan"))
        loss = loss * FACTORS[code] if code in FACTORS else loss
        self.scaler.scale(loss).backward()
        zero = torch.cat([weight.grad.flatten() == 0 for weight in self.weights])
        there, error = self._exact(batch)
        self._clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        dead = bool(there.any() and zero.all())
        gone = int((zero & there).sum())
        return self.scaler.last_step.applied, gone, int(there.sum()), dead, error

    def _exact(self, batch: Sequence[Tensor]) -> tuple[Tensor, float]:
        """Return which gradients are not 0 in FP32, and the error."""
        wide = [weight.detach().float().requires_grad_() for weight in self.weights]
        loss, _ = self.loss(wide, batch, half=False)
        grads = torch.autograd.grad(loss, wide)
        return torch.cat([grad.flatten() != 0 for grad in grads]), float(loss.detach())

    def _clip(self) -> None:
        """Clip by Buoy, or as scripts for torch's own scaler do."""
        if self.task.max_norm is not None:
            self.scaler.clip_grad_norm_(self.optimizer, self.task.max_norm)
            return
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)


def _train(
    name: str, policy: str | buoy.Policy, seed: int, codes: np.ndarray
) -> Outcome:
    task = TASKS[name]
    one = _Run(task, policy, seed)
    data = task.draw(np.random.default_rng([seed, 2]), task.steps)
    x, y, bits = map(torch.from_numpy, data)
    y = y.long() if y.dtype == torch.int32 else y
    seen = [
        one.step(batch, int(code))
        for *batch, code in zip(x, y, bits, codes, strict=True)
    ]
    return outcome_of(codes, zip(*seen, strict=True))


def _files(name: str) -> list[Path]:
    here = Path(__file__).parent
    return [
        *sorted((PACKAGE / "_backends" / "torch").rglob("*.py")),
        *sorted((PACKAGE / "torch").rglob("*.py")),
        here / "torch_trainings.py",
        here / "mlp_tasks.py",
    ]


TRAININGS = Trainings(TASKS, _train, _files, mlp_tasks.QUICK)
run = TRAININGS.run
judge = TRAININGS.judge


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return 1 if a policy breaks a bound."""
    torch.set_num_threads(1)  # the tensors are small
    logging.getLogger("buoy").setLevel(logging.ERROR)  # skips are what is counted
    return TRAININGS.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
