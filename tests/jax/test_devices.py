"""Several devices and several processes decide as one."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
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
        timeout=600,
    )

    assert run.returncode == 0, run.stdout + run.stderr
    assert "skipped" not in run.stdout


@pytest.mark.slow
def test_two_processes():
    """With jax.distributed, both end every step with the same scale and weights."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    script = str(HERE / "two_processes.py")
    runs = [
        subprocess.Popen(
            [sys.executable, script, port, str(rank)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [run.communicate(timeout=300) for run in runs]
    finally:
        for run in runs:
            run.kill()

    for run, (_, trouble) in zip(runs, told, strict=True):
        assert run.returncode == 0, trouble
    first, second = (out.splitlines()[-2:] for out, _ in told)
    assert first == second
    spmd, mapped = first
    assert mapped.count("False") == 3  # the three overflows, each on one process
    assert spmd.count("False") <= 3  # some are foreseen
    assert "(65536.0, True)" in mapped
    assert "(8192.0, True)" in mapped
