"""Build the wheel, install it alone into a fresh environment, and use it there.

What users get is tested, not the checkout: no dependency comes along, the core works,
and the `buoy` command says which extra it needs.
"""

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command away from the checkout."""
    with tempfile.TemporaryDirectory() as elsewhere:
        return subprocess.run(
            [str(word) for word in command],
            capture_output=True,
            text=True,
            check=False,
            cwd=elsewhere,
        )


def expect(result: subprocess.CompletedProcess[str], code: int, words: str) -> None:
    """Stop unless the command ended and spoke as it should."""
    if result.returncode != code or words not in result.stdout + result.stderr:
        sys.exit(
            f"{result.args}: exit {result.returncode}, expected {code} and {words!r}\n"
            f"{result.stdout}{result.stderr}"
        )


def main() -> None:
    """Build, install, try."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        expect(
            run(
                sys.executable, "-m", "build", "--wheel", "--no-isolation",
                "--outdir", scratch, ROOT,
            ),
            0,
            "Successfully built",
        )  # fmt: skip
        wheel = next(scratch.glob("*.whl"))
        venv.create(scratch / "venv", with_pip=True)
        binaries = scratch / "venv" / ("Scripts" if sys.platform == "win32" else "bin")
        python = binaries / "python"
        expect(run(python, "-m", "pip", "install", wheel), 0, "Successfully installed")
        installed = run(python, "-m", "pip", "list", "--format=freeze").stdout.split()
        extra = {line.partition("==")[0] for line in installed} - {
            "buoy-amp",
            "pip",
            "setuptools",
        }
        if extra:
            sys.exit(f"the wheel pulled in {sorted(extra)}")
        name, version = wheel.name.split("-")[:2]
        if name != "buoy_amp":
            sys.exit(f"the distribution is called {name}")
        expect(run(python, "-c", "import buoy; print(buoy.__version__)"), 0, version)
        code = "import buoy; print(buoy.policy('torch').init().scale)"
        expect(run(python, "-c", code), 0, "65536.0")
        expect(run(binaries / "buoy", "--help"), 1, 'pip install "buoy-amp[cli]"')
    print("wheel: installs alone, works without any framework; 1 passed, 0 failed")


if __name__ == "__main__":
    main()
