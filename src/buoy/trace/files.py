"""Files that are read from anywhere and written in one piece."""

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from buoy._core.errors import TraceError

__all__ = ["check_readable", "replace_file"]


def check_readable(where: str) -> None:
    """Raise unless there is a plain file: a pipe or a device may never end."""
    try:
        mode = Path(where).stat().st_mode
    except FileNotFoundError as error:
        message = f"There is no trace {where!r}. Check the name and the folder."
        raise TraceError(message) from error
    except (OSError, ValueError) as error:  # a NUL in the name
        reason = getattr(error, "strerror", None) or error
        message = f"Cannot read the trace {where!r}: {reason}. Check the file."
        raise TraceError(message) from error
    if not stat.S_ISREG(mode):
        message = (
            f"Cannot read the trace {where!r}: it is not a plain file. "
            "Write pipes to a file first."
        )
        raise TraceError(message)


def replace_file(target: Path, data: bytes, what: str) -> None:
    """Write a file completely or not at all; never through a symbolic link."""
    part = None
    try:
        if target.exists() and not target.is_file():
            raise OSError("it is a folder, a pipe or a device")  # noqa: TRY301
        # An unpredictable name: `mkstemp` follows no link.
        number, part = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        with open(number, "wb") as file:  # noqa: PTH123 - it is open already
            file.write(data)
        Path(part).chmod(0o666 & ~_umask())
        Path(part).replace(target)
    except (OSError, ValueError) as error:  # a NUL in the name
        if part is not None:
            with contextlib.suppress(OSError):
                Path(part).unlink()
        reason = getattr(error, "strerror", None) or error
        message = (
            f"Cannot write the {what} {str(target)!r}: {reason}. "
            "Name a file in a folder that exists and may be written to."
        )
        raise TraceError(message) from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
