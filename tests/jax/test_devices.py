"""Several devices and several processes decide as one."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_four_devices_in_one_process():
    """SPMD jit, shard_map and pmap over four devices hold what they must."""
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, str(HERE / "on_four_devices.py")],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )

    assert run.returncode == 0, run.stdout + run.stderr
    assert "skipped" not in run.stdout
