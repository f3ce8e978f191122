"""Print the seconds of CPU that a replay of a long trace takes, per policy and in all.

Budget: a million steps under ten policies within a minute, on one core.

    python benchmarks/replay.py [STEPS [KIND]]
"""

import sys
import time

import buoy.trace
from buoy._core.replay.compare import oracle, replay

POLICIES = (
    "headroom",
    "backoff",
    "torch",
    "megatron",
    "deepspeed",
    "fairseq",
    "keras",
    "flax",
    "lognormal",
    "static",
)


def main() -> None:
    """Replay every policy once over one trace and print what it took."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    kind = sys.argv[2] if len(sys.argv) > 2 else "spikes"
    began = time.process_time()
    trace = buoy.trace.synthetic(kind, steps=steps, seed=0)
    print(f"trace      {time.process_time() - began:6.2f} s")
    total = 0.0
    for name in POLICIES:
        began = time.process_time()
        (result,) = replay(trace, [name])
        took = time.process_time() - began
        total += took
        print(f"{name:10s} {took:6.2f} s  {result.skipped} skipped")
    print(f"{len(POLICIES)} policies x {steps} steps: {total:.2f} s (budget 60 s)")
    began = time.process_time()
    oracle(trace)
    print(f"oracle     {time.process_time() - began:6.2f} s")


if __name__ == "__main__":
    main()
