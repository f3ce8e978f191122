"""Start a script on two ranks, and collect what each found."""

import json
import os
import subprocess
import sys
from pathlib import Path


def run_ranks(script: str, folder: Path, *arguments: str) -> list[dict]:
    """Run a script of this folder with torchrun; it ends with `report`."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    worker = str(Path(__file__).with_name(script))
    started = subprocess.Popen(
        [*run, "--nproc-per-node", "2", worker, str(folder), *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        _, errors = started.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        started.terminate()  # torchrun ends its ranks, which a kill would leave
        _, errors = started.communicate(timeout=60)
    # Not the exit status: threads of gloo may outlive the interpreter and abort.
    found = [folder / f"{rank}.json" for rank in range(2)]
    assert all(one.exists() for one in found), errors[-5000:]
    return [json.loads(one.read_text()) for one in found]


def report(found: dict) -> None:
    """Write what this rank found."""
    path = Path(sys.argv[1]) / f"{os.environ['RANK']}.json"
    path.write_text(json.dumps(found))
