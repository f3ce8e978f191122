"""Run a user's script in this process, as `python script.py` would.

The script sees its own `sys.argv`, is `__main__`, and finds its neighbours: its folder
is first on `sys.path`.  Nothing of it is changed.
"""

import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from buoy._core.errors import BuoyError

__all__ = ["ProgramError", "exit_code", "print_traceback", "run_program"]

_OWN = str(Path(__file__).parents[1])
_INTERRUPTED = 130  # what a shell reports of a program that Ctrl-C ended


class ProgramError(BuoyError, FileNotFoundError):
    """The script or module to be run is not there."""


def run_program(target: str, args: Sequence[str], *, module: bool = False) -> None:
    """Run a script, or with `module` what `python -m` would; raise what it raises."""
    if not module and not Path(target).exists():
        message = (
            f"There is no script {target!r}. Name a Python file, or a module with "
            "`-m`, followed by its own arguments."
        )
        raise ProgramError(message)
    folder = Path.cwd() if module else Path(target).resolve().parent
    with _arguments([target, *args], str(folder)):
        if module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target, run_name="__main__")


@contextmanager
def _arguments(argv: list[str], folder: str) -> Iterator[None]:
    own_argv = sys.argv
    own_path = list(sys.path)
    sys.argv = argv
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.argv = own_argv
        sys.path[:] = own_path


def exit_code(error: BaseException | None) -> int:
    """Return the exit code of a process that ended so; print what it would print."""
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        if error.code is None:
            return 0
        if isinstance(error.code, int):
            return error.code
        sys.stderr.write(f"{error.code}\n")
        return 1
    print_traceback(error)
    return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def print_traceback(error: BaseException) -> None:
    """Print a traceback that starts in the script, not in what runs it."""
    shown: TracebackType | None = error.__traceback__
    while shown is not None and _is_ours(shown):
        shown = shown.tb_next
    kept = shown or error.__traceback__
    traceback.print_exception(type(error), error, kept, file=sys.stderr)


def _is_ours(frame: TracebackType) -> bool:
    name = frame.tb_frame.f_code.co_filename
    return name.startswith(_OWN) or "runpy" in name
