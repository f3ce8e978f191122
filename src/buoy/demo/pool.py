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
from multiprocessing.synchronize import Event

from buoy.demo.columns import Column
from buoy.demo.train import Outcome, train
from buoy.demo.workloads import WORKLOADS

__all__ = ["Job", "cores", "run"]

_PATIENCE = 20.0  # seconds for trainings to end after Ctrl-C
_MOST = 8  # trainings at once
_stop: Event | None = None  # in a worker: set by Ctrl-C


@dataclass(frozen=True, slots=True)
class Job:
    """One training to run; all of it can be sent to another process."""

    workload: str
    column: Column
    seed: int
    steps: int


def cores() -> int:
    """Return how many trainings may run at once."""
    if hasattr(os, "sched_getaffinity"):  # not on a Mac, nor on Windows
        usable = len(os.sched_getaffinity(0))
    else:
        usable = os.cpu_count() or 1
    return min(usable, _MOST)


def run(jobs: Iterable[Job], workers: int, done: Callable[[Outcome], None]) -> bool:
    """Run all jobs, call `done` for each; return False if Ctrl-C ended it early."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    pool = ProcessPoolExecutor(workers, context, _begin, (stop,))
    with _ctrl_c_ignored():  # which workers inherit
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
def _ctrl_c_ignored() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _begin(stop: Event) -> None:
    """Set a worker up."""
    import torch  # noqa: PLC0415 - in the worker

    global _stop  # noqa: PLW0603 - a worker belongs to one pool
    _stop = stop
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)


def _work(job: Job) -> Outcome:
    return train(WORKLOADS[job.workload], job.column, job.seed, job.steps, _is_over)


def _is_over() -> bool:
    return _stop is not None and _stop.is_set()
