"""The command `buoy`: one file per command, and no framework imported by any.

It needs the extra `cli` (click and rich).  Without it the command still exists, and
says what to install.
"""

import sys

__all__ = ["main"]

_MISSING = """\
The command `buoy` needs {missing}, which is not installed.
Install what it needs:  python -m pip install "buoy-amp[cli]"
The library itself works without it: `import buoy`.
"""


def main() -> int:
    """Run the command line; return 0, 1 for an error of ours, 2 for wrong usage.

    Example:
        >>> from unittest.mock import patch
        >>> with patch("sys.argv", ["buoy", "formats", "--json"]):
        ...     main()  # doctest: +ELLIPSIS
        {"formats": [{"name": "fp32", ...
        0
    """
    missing = _missing()
    if missing:
        sys.stderr.write(_MISSING.format(missing=missing))
        return 1
    from buoy.cli.app import run  # noqa: PLC0415 - needs click

    return run()


def _missing() -> str:
    from importlib.util import find_spec  # noqa: PLC0415

    return " and ".join(name for name in ("click", "rich") if not find_spec(name))
