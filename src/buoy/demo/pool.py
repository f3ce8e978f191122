"""Run trainings on all cores, and stop in good order when asked to.

Ctrl-C reaches this process alone: it tells the workers, which end their trainings at
the next few steps and hand over what they have.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from buoy.demo.columns import Column
from buoy.demo.train import Outcome, train
from buoy.demo.workloads import WORKLOADS

__all__ = ["Job", "cores", "run"]

_PATIENCE = 20.0  # seconds for trainings to end after Ctrl-C
_MOST = 8
_stop: Any = None  # in a worker: the event that says so


@dataclass(frozen=True, slots=True)
class Job:
    """One training to run; all of it can be sent to another process."""

    workload: str
    column: Column
    seed: int
    steps: int


def cores() -> int:
    """Tell how many trainings may run at once."""
    usable = getattr(os, "sched_getaffinity", None)
    count = len(usable(0)) if usable else os.cpu_count() or 1
    return min(count, _MOST)


def run(jobs: Iterable[Job], workers: int, done: Callable[[Outcome], None]) -> bool:
    """Run all jobs, call `done` for each; return False if Ctrl-C ended it early."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    pool = ProcessPoolExecutor(workers, context, _begin, (stop,))
    with _deaf():  # which workers inherit
        pending = [pool.submit(_work, job) for job in jobs]
    try:
        for future in as_completed(pending):
            done(future.result())
            pending.remove(future)
    except KeyboardInterrupt:
        stop.set()
        for outcome in _rest(pending):
            done(outcome)
        return False
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)
    return True


def _rest(pending: list["Future[Outcome]"]) -> Iterator[Outcome]:
    """Take the jobs that were running when Ctrl-C was pressed."""
    begun = [future for future in pending if not future.cancel()]
    for future in wait(begun, _PATIENCE).done:
        try:
            outcome = future.result()
        except BrokenProcessPool:
            continue
        if outcome.steps:
            yield outcome


@contextmanager
def _deaf() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _begin(stop: Any) -> None:
    import torch  # noqa: PLC0415 - in the worker

    global _stop  # noqa: PLW0603 - a worker belongs to one pool
    _stop = stop
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)


def _work(job: Job) -> Outcome:
    return train(WORKLOADS[job.workload], job.column, job.seed, job.steps, _stop.is_set)
