"""What the trainings of every framework share: a run's outcome, its file, a command.

A framework brings its tasks and a function that trains one of them; `Trainings` makes
of them `run`, as `judge` calls it, and the command line.
"""

import argparse
import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

import buoy
from benchmarks.headroom import judge as judging
from benchmarks.headroom.bad_batches import GOOD, Schedule
from benchmarks.headroom.judge import EXACT, SEEDS, STOCK, Judgement, Outcome, Run

__all__ = ["PACKAGE", "Trainings", "outcome_of"]

PACKAGE = Path(buoy.__file__).parent
HERE = Path(__file__).parent
COUNTED = 2000  # skips are counted in the first so many steps


class Scheduled(Protocol):
    """A task, as far as it matters here."""

    @property
    def steps(self) -> int: ...

    @property
    def bad(self) -> Schedule | None: ...


def outcome_of(codes: np.ndarray, seen: Iterable[ArrayLike]) -> Outcome:
    """Sum up a training; `seen` has five arrays with a number for each step.

    These are: whether the step was applied, how many gradients were 0 in FP16 and not
    in FP32, how many were not 0 in FP32, whether all were lost, and the error in FP32.
    """
    kept, gone, there, dead, error = map(np.asarray, seen)
    good = codes == GOOD
    applied = kept & good
    return Outcome(
        skips=int(np.sum(~kept[:COUNTED])),
        lost=100 * float(gone[applied].sum() / max(there[applied].sum(), 1)),
        dead=100 * float(np.sum(dead & applied) / np.sum(good)),
        loss=float(np.mean(error[-(len(codes) // 10) :])),
    )


class Trainings:
    """The trainings of one framework.

    `train` gets a task's name, a policy, a seed and the code of each batch; `files`
    returns what the outcomes of a task depend on, besides the policy and the core.
    Outcomes are kept by `where`, too, if a framework has several backends.
    """

    def __init__(
        self,
        tasks: Mapping[str, Scheduled],
        train: Callable[[str, str | buoy.Policy, int, np.ndarray], Outcome],
        files: Callable[[str], Iterable[Path]],
        quick: Sequence[str] = (),
        forget: Callable[[], None] = lambda: None,
        where: str = "",
    ) -> None:
        self.tasks = tasks
        self.quick = quick
        self._train = cache(train_with(tasks, train))
        self._files = files
        self._drop = forget
        self._where = where

    def run(
        self, name: str, policy: str | buoy.Policy, seed: int = 0, *, bad: bool = True
    ) -> Outcome:
        """Train under a policy, by name or object; `fp32` is the training in FP32.

        With `bad=False`, the bad batches of the task are left out.
        """
        return self._train(name, policy, seed, bad and self._is_bad(name))

    def forget(self) -> None:
        """Drop all outcomes, and what the framework keeps of a task."""
        self._train.cache_clear()
        self._drop()

    def judge(
        self,
        name: str,
        policy: str | buoy.Policy = "headroom",
        seeds: Sequence[int] = SEEDS,
    ) -> Judgement:
        """Run a task under a policy, torch's rule and FP32, and check every bound."""
        return judging.judge(self.run, name, policy, seeds)

    def _is_bad(self, name: str) -> bool:
        return self.tasks[name].bad is not None

    def _kept(self, path: Path) -> Run:
        """Return `run` with its outcomes in a file, by what they depend on."""
        lines = path.read_text().splitlines() if path.exists() else []
        found = {key: Outcome(**one) for key, one in map(json.loads, lines)}
        digest = cache(self._digest)

        def kept(
            name: str, policy: str | buoy.Policy, seed: int = 0, *, bad: bool = True
        ) -> Outcome:
            bad = bad and self._is_bad(name)
            key = f"{name} {policy} {seed} {bad} {digest(name, policy)}"
            if key not in found:
                found[key] = self.run(name, policy, seed, bad=bad)
                with path.open("a") as file:
                    file.write(json.dumps([key, asdict(found[key])]) + "\n")
            return found[key]

        return kept

    def _digest(self, name: str, policy: str | buoy.Policy) -> str:
        """Hash the files that an outcome depends on, of other policies' files none."""
        files = [
            *sorted((PACKAGE / "_core").glob("*.py")),
            *(HERE / f"{stem}.py" for stem in ("harness", "bad_batches")),
            *self._files(name),
        ]
        if policy != EXACT:
            rule = buoy.policy(policy) if isinstance(policy, str) else policy
            file = Path(inspect.getfile(type(rule)))
            files += sorted(file.parent.glob(f"{file.stem}*.py"))
        digest = hashlib.sha256(self._where.encode())
        for file in files:
            digest.update(file.read_bytes())
        return digest.hexdigest()[:16]

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Print the table; return 1 if a policy breaks a bound."""
        options = self._options(arguments)
        names = options.names or (self.quick if options.quick else self.tasks)
        train = self._kept(options.keep) if options.keep else self.run
        policies = [*options.policy, STOCK]
        print(f"| training | {' | '.join(policies)} |")
        print("|---" * (len(policies) + 1) + "|")
        broken = []
        for name in names:
            row = [judging.judge(train, name, each, options.seeds) for each in policies]
            cells = " | ".join(map(_cell, row))
            print(f"| {name.replace('_', ' ')} | {cells} |", flush=True)
            broken += row
            self.forget()
        print("\nBounds that are broken:")
        for one in broken:
            for sentence in one.broken:
                print(f"- {one.task.replace('_', ' ')}, {one.policy}: {sentence}")
        return int(any(one.broken and one.policy != STOCK for one in broken))

    def _options(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        parser = argparse.ArgumentParser(
            description="Judge policies on real trainings."
        )
        add = parser.add_argument
        add("names", nargs="*", metavar="NAME", help="tasks; default: all")
        add("--policy", nargs="+", default=["headroom"], metavar="NAME")
        add("--seeds", nargs="+", type=int, default=list(SEEDS))
        add("--quick", action="store_true", help="a few of the tasks only")
        add("--keep", type=Path, metavar="FILE", help="store outcomes here")
        options = parser.parse_args(arguments)
        unknown = [name for name in options.names if name not in self.tasks]
        if unknown:
            known = ", ".join(self.tasks)
            parser.error(f"no task is named {', '.join(unknown)}; got {known}")
        return options


def train_with(
    tasks: Mapping[str, Scheduled],
    train: Callable[[str, str | buoy.Policy, int, np.ndarray], Outcome],
) -> Callable[[str, str | buoy.Policy, int, bool], Outcome]:
    """Return a function that draws the bad batches of a seed, and trains."""

    def trained(name: str, policy: str | buoy.Policy, seed: int, bad: bool) -> Outcome:
        steps = tasks[name].steps
        schedule = tasks[name].bad
        codes = np.full(steps, GOOD)
        if bad and schedule is not None:
            codes = schedule(np.random.default_rng(seed), steps)
        return train(name, policy, seed, codes)

    return trained


def _cell(one: Judgement) -> str:
    mark = " **x**" if one.broken else ""
    return f"{one.skips} / {one.lost:.3f} / {one.dead:.1f} / {one.loss:.3f}{mark}"
