"""A name for a new trace: one run at a time looks for it, and no run loses its file.

SQLite finds the log beside a file by the file's name.  So two processes must
not open, move or create a trace at the same time: a lock on the folder orders them.
"""

import contextlib
import os
import sqlite3
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from buoy._core.errors import TraceError
from buoy.trace.schema import APPLICATION, MAGIC

__all__ = ["free_name", "locked"]

_PATIENCE = 10.0  # seconds for the processes before this one
_PAUSE = 0.005
_LOCK = ".buoy.lock"  # removed after use; one that a killed process left does no harm


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep every other process from starting a trace in this folder meanwhile.

    Where there are no such locks (Windows, some network folders) nothing is locked.
    """
    try:
        import fcntl  # noqa: PLC0415 - not on Windows
    except ImportError:
        yield
        return
    path = folder / _LOCK
    end = time.monotonic() + _PATIENCE
    while True:
        file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is(file, path):
                break
        except BlockingIOError:
            if time.monotonic() > end:
                os.close(file)
                message = f"another process has locked {str(path)!r}; remove that file"
                raise TraceError(message) from None
            time.sleep(_PAUSE)
        except OSError:
            break  # this file system has no locks
        os.close(file)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        # Not left to `close`: a forked child may hold the descriptor too.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)


def _is(file: int, path: Path) -> bool:
    """Return whether the name still leads to the open file."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False  # the process before this one has removed it


def free_name(path: Path) -> Path:
    """Move an earlier run's file aside; leave a foreign one alone.

    `run.buoy` becomes `run-1.buoy`; if it is still being written to, the new run takes
    that name instead.  Call it under the folder's lock.
    """
    if not path.exists():
        for ending in ("-wal", "-shm"):
            path.with_name(path.name + ending).unlink(missing_ok=True)
        return path
    message = f"{str(path)!r} exists and is not a trace of Buoy; it was not changed"
    if not stat.S_ISREG(path.stat().st_mode):  # opening a FIFO would never return
        raise TraceError(message)
    with path.open("rb") as file:
        head = file.read(72)
    mine = head[68:72] == APPLICATION.to_bytes(4, "big")
    if head and not (head.startswith(MAGIC) and mine):
        raise TraceError(message)
    number = 1
    while (other := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    if head and not _at_rest(path):
        return other
    path.rename(other)
    return path


def _at_rest(path: Path) -> bool:
    """Return whether no process has the file open; then there is no WAL beside it."""
    file = sqlite3.connect(path, timeout=0.0)
    try:
        mode = file.execute("PRAGMA journal_mode = DELETE").fetchone()[0]
    except sqlite3.OperationalError:
        return False
    except sqlite3.DatabaseError:
        return True  # damaged: its writer has ended
    finally:
        file.close()
    return bool(mode == "delete")
