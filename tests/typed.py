"""Run pieces of code, each as if it were typed into a fresh interpreter.

Most pieces take less time than importing torch does.  A server process imports it once
and forks for each piece, which then imports everything else by itself.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

__all__ = ["Typist"]


class Typist:
    """Runs code in forks of a process that has imported torch, and nothing of Buoy."""

    def __init__(self, home: Path) -> None:
        self._said = home / "stdout"
        self._complained = home / "stderr"
        self._server = subprocess.Popen(
            [sys.executable, __file__, str(self._said), str(self._complained)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, code: str, folder: Path) -> subprocess.CompletedProcess[str]:
        """Run the code in a folder; return its exit code and what it printed."""
        assert self._server.stdin
        assert self._server.stdout
        self._server.stdin.write(json.dumps([code, str(folder)]) + "\n")
        self._server.stdin.flush()
        return subprocess.CompletedProcess(
            code,
            int(self._server.stdout.readline()),
            self._said.read_text(),
            self._complained.read_text(),
        )

    def close(self) -> None:
        """End the server."""
        self._server.communicate()


def serve(said: str, complained: str) -> None:
    """Fork for each piece of code that comes in; a fork ends as the code does."""
    import torch._dynamo  # noqa: F401 - the first step of an optimizer imports it

    for line in sys.stdin:
        code, folder = json.loads(line)
        child = os.fork()
        if child == 0:
            for stream, name in enumerate((os.devnull, said, complained)):
                flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
                os.dup2(os.open(name, flags if stream else os.O_RDONLY), stream)
            os.chdir(folder)
            type_in(code)
            return
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


def type_in(code: str) -> None:
    """Run code as `python -c` does."""
    sys.argv = ["-c"]
    sys.path[0] = ""
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    exec(compile(code, "<string>", "exec"), vars(main))  # noqa: S102


if __name__ == "__main__":
    serve(*sys.argv[1:])
