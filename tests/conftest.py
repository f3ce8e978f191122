"""What every test shares: one hypothesis profile, one thread for torch."""

import os

# Before anything imports torch, and for every process that a test starts.  Some virtual
# machines advertise AMX and then fault on it: a plain BF16 `torch.nn.Linear` ends the
# process with SIGILL.  This keeps oneDNN below AMX; without AMX it is no limit.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import importlib.util
import shutil
import signal

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A script that starts the suite with `&` has it ignore Ctrl-C, and every process that
# a test starts would, too; some tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "buoy",
    deadline=None,
    derandomize=True,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("buoy")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What `make test` leaves out `make quick` does, too."""
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker("slow")


def pytest_report_header() -> str:
    """Say in one line what the run leaves out, and why."""
    missing = [
        name
        for name in ("numpy", "torch", "jax", "ml_dtypes", "click", "rich")
        if importlib.util.find_spec(name) is None
    ]
    missing += [name for name in ("chromium", "chromedriver") if not shutil.which(name)]
    left_out = f"not installed: {', '.join(missing)}" if missing else "nothing"
    if importlib.util.find_spec("keras") is None:
        left_out += "; `make test-keras` runs tests/keras"
    if importlib.util.find_spec("modelopt") is None:
        left_out += "; `make test-qat` runs tests/qat"
    if importlib.util.find_spec("accelerate") is None:
        left_out += "; `make test-integrations` runs tests/integrations"
    return f"buoy: left out: {left_out}"
