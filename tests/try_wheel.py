"""Build wheel and sdist, install each alone into a fresh environment, and use it there.

    python tests/try_wheel.py [--keep FOLDER]

What users get is tested, not the checkout: no dependency comes along, the core works,
and the `buoy` command says which extra it needs.  `--keep` leaves both files there.
"""

import argparse
import shutil
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


def build(folder: Path) -> list[Path]:
    """Build the wheel from the sdist, as an installer would."""
    expect(
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT),
        0,
        "Successfully built",
    )
    return sorted(path for path in folder.iterdir() if path.is_file())


def try_out(distribution: Path, folder: Path) -> None:
    """Install one file alone, and use it."""
    venv.create(folder, with_pip=True)
    binaries = folder / ("Scripts" if sys.platform == "win32" else "bin")
    python = binaries / "python"
    done = run(python, "-m", "pip", "install", distribution)
    expect(done, 0, "Successfully installed")
    installed = run(python, "-m", "pip", "list", "--format=freeze").stdout.split()
    extra = {line.partition("==")[0] for line in installed}
    extra -= {"buoy-amp", "pip", "setuptools"}
    if extra:
        sys.exit(f"{distribution.name} pulled in {sorted(extra)}")
    name, version = distribution.name.removesuffix(".tar.gz").split("-")[:2]
    if name != "buoy_amp":
        sys.exit(f"the distribution is called {name}")
    expect(run(python, "-c", "import buoy; print(buoy.__version__)"), 0, version)
    code = "import buoy; print(buoy.policy('torch').init().scale)"
    expect(run(python, "-c", code), 0, "65536.0")
    expect(run(binaries / "buoy", "--help"), 1, 'pip install "buoy-amp[cli]"')


def main() -> None:
    """Build, install, try."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path)
    kept = parser.parse_args().keep
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for distribution in build(scratch / "dist"):
            try_out(distribution, scratch / distribution.suffix)
            if kept is not None:
                kept.mkdir(exist_ok=True)
                shutil.copy(distribution, kept)
    print("wheel and sdist: each installs alone and works without any framework")
    print("2 passed, 0 failed")


if __name__ == "__main__":
    main()
