"""What a training shows of a policy, and the bounds that every policy is held to.

This file knows no framework.  `trainings` runs tasks in JAX, `torch_trainings` and
`keras_trainings` a few of them in torch and Keras; each brings a function `run`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol

import buoy

__all__ = ["EXACT", "SEEDS", "STOCK", "Judgement", "Outcome", "Run", "judge"]

SEEDS = (0, 1, 2)
EXACT = "fp32"  # the same training in FP32; bad batches are skipped
STOCK = "torch"  # the rule that all others are compared with

MORE_SKIPS = 5
MORE_LOST = 0.1  # % of the weights' gradients
MORE_DEAD = 1.0  # % of the good steps


@dataclass(frozen=True)
class Outcome:
    """What one training under one policy and seed showed."""

    skips: int  # in the first 2000 steps, bad batches included
    lost: float  # % of gradients that are 0 in FP16 and not in FP32, in applied steps
    dead: float  # % of good steps that were applied with all gradients 0
    loss: float  # mean over the last tenth of the steps, measured in FP32


class Run(Protocol):
    """Train; with `bad=False`, without the bad batches that the task injects."""

    def __call__(
        self, name: str, policy: str | buoy.Policy, seed: int = 0, *, bad: bool = True
    ) -> Outcome: ...


@dataclass(frozen=True)
class Judgement:
    """The outcomes of a policy over all seeds, and the bounds that it breaks."""

    task: str
    policy: str | buoy.Policy
    outcomes: tuple[Outcome, ...]
    exact: tuple[Outcome, ...]
    broken: tuple[str, ...]  # one sentence each; empty if every bound holds

    @property
    def skips(self) -> int:
        """The most of any seed."""
        return max(one.skips for one in self.outcomes)

    @property
    def lost(self) -> float:
        """The most of any seed, in %."""
        return max(one.lost for one in self.outcomes)

    @property
    def dead(self) -> float:
        """The most of any seed, in %."""
        return max(one.dead for one in self.outcomes)

    @property
    def loss(self) -> float:
        """The mean final loss, relative to FP32's."""
        return _mean_loss(self.outcomes) / _mean_loss(self.exact)


def judge(
    run: Run,
    task: str,
    policy: str | buoy.Policy = "headroom",
    seeds: Sequence[int] = SEEDS,
) -> Judgement:
    """Run a task under a policy, torch's rule and FP32, and check every bound.

    The same bad batches are injected for all.  Only for dead steps the policy is
    compared with torch's rule in a run without them.
    """
    outcomes = tuple(run(task, policy, seed) for seed in seeds)
    stock = [run(task, STOCK, seed) for seed in seeds]
    clean = [run(task, STOCK, seed, bad=False) for seed in seeds]
    exact = tuple(run(task, EXACT, seed) for seed in seeds)
    broken = []
    for seed, mine, its, calm in zip(seeds, outcomes, stock, clean, strict=True):
        if mine.skips > its.skips + MORE_SKIPS:
            broken.append(f"skips: {mine.skips} for {its.skips} (seed {seed})")
        if mine.lost > its.lost + MORE_LOST:
            broken.append(f"lost: {mine.lost:.3g} % for {its.lost:.3g} % (seed {seed})")
        if mine.dead > calm.dead + MORE_DEAD:
            broken.append(
                f"dead: {mine.dead:.3g} % for {calm.dead:.3g} % (seed {seed})"
            )
    losses = [one.loss for one in exact]
    spread = max(losses) - min(losses)
    worse = _mean_loss(outcomes) - _mean_loss(exact)
    if not worse <= spread:  # also if it is NaN
        broken.append(
            f"loss: {_mean_loss(outcomes):.4g} for FP32's {_mean_loss(exact):.4g} "
            f"(spread of the seeds {spread:.2g})"
        )
    return Judgement(task, policy, outcomes, exact, tuple(broken))


def _mean_loss(outcomes: Sequence[Outcome]) -> float:
    return fmean(one.loss for one in outcomes)
