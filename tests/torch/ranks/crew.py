"""Real processes that run the same function together, over gloo.

A server process imports torch once and forks: a crew starts in a fraction of a second.
Ranks meet through a file, never through a port; whoever takes too long is killed.
A rank that crashes prints the Python stacks of its threads.
"""

import faulthandler
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PATIENCE = 120.0  # seconds until a crew that does not answer is killed
CRASHES = {-signal.SIGABRT, -signal.SIGSEGV}  # exit codes of native code
HEAVY = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
    "torch.distributed.checkpoint",
    "buoy.torch",
]


class CrewError(Exception):
    """A rank raised; `kind` is the name of what."""

    def __init__(self, rank: int, kind: str, message: str, trace: str) -> None:
        super().__init__(f"rank {rank}: {kind}: {message}\n{trace}")
        self.rank, self.kind, self.message = rank, kind, message


class Crew:
    """Processes of one group, waiting for work."""

    def __init__(
        self, size: int, timeout: float = 60.0, backend: str | None = "gloo"
    ) -> None:
        self._size, self._options = size, (timeout, backend)
        self._start()

    def _start(self) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(HEAVY)
        self._home = tempfile.TemporaryDirectory()
        meeting = str(Path(self._home.name) / "store")
        self.pipes, self.processes = [], []
        for rank in range(self._size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve,
                args=(rank, self._size, meeting, *self._options, theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self.alive = True

    def run(self, function: Any, *args: Any) -> list[Any]:
        """Run a function on every rank; return what each returned, or raise.

        If a rank crashes in native code, the crew starts again and repeats the call,
        once: FSDP2 over gloo aborts with a damaged heap in rare runs.  A crash that
        the function causes happens again.
        """
        found = self.outcomes(function, *args)
        if self._crashed():
            warnings.warn(f"a rank crashed in {function.__name__}{args}", stacklevel=2)
            self.close()
            self._start()
            found = self.outcomes(function, *args)
        for outcome in found:
            if isinstance(outcome, Exception):
                raise outcome
        return found

    def _crashed(self) -> bool:
        return any(process.exitcode in CRASHES for process in self.processes)

    def outcomes(
        self, function: Any, *args: Any, patience: float = PATIENCE
    ) -> list[Any]:
        """Run a function on every rank; return what each returned or raised."""
        for pipe in self.pipes:
            pipe.send((function.__module__, function.__name__, args))
        answers: list[Any] = [None] * len(self.pipes)
        waiting = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        while waiting:
            ready = wait(list(waiting), patience)
            if not ready:
                self.close()
                message = f"ranks {sorted(waiting.values())} did not answer"
                raise TimeoutError(message)
            for pipe in ready:
                rank = waiting.pop(pipe)
                answers[rank] = self._received(pipe, rank)
        return answers

    def _received(self, pipe: Connection, rank: int) -> Any:
        try:
            fine, answer = pipe.recv()
        except (EOFError, ConnectionResetError):
            self.processes[rank].join(PATIENCE)
            code = self.processes[rank].exitcode
            return CrewError(
                rank, "gone", f"the process has ended: exit code {code}", ""
            )
        return answer if fine else CrewError(rank, *answer)

    def close(self) -> None:
        """Send everybody home; whoever does not go within a second is killed."""
        self.alive = False
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(1.0)
            process.kill()
            process.join()
        self._home.cleanup()


def serve(
    rank: int,
    size: int,
    meeting: str,
    timeout: float,
    backend: str | None,
    pipe: Connection,
) -> None:
    """Join the group, then do what is asked until nobody asks any more."""
    import torch
    from torch import distributed as dist

    faulthandler.enable()
    sys.path.insert(0, str(Path(__file__).parent))
    torch.set_num_threads(1)
    store = dist.FileStore(meeting, size)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )
    while True:
        try:
            module, name, args = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            function = getattr(importlib.import_module(module), name)
            pipe.send((True, function(*args)))
        except Exception as error:  # noqa: BLE001 - it is told to who asked
            kind = type(error).__name__
            pipe.send((False, (kind, str(error), traceback.format_exc())))
