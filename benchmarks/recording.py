"""What recording a run costs, as a share of the step: the budget is 2 %.

    python benchmarks/recording.py [--rounds N] [--parameters N]

Two scalers step the same 30 million parameters in turn, one of them recording.  Steps
are of three kinds: all note some numbers, which is measured with tiny tensors; every
64th looks for the largest gradient; every 100th counts exponents.  The cost is the sum
of their medians, each weighted by how often it comes.  The step is the scaler's and the
optimizer's alone; a whole training step is longer, and the share of it smaller.  Time
is the process's on the CPU, the writing thread's included, so that a neighbour on the
machine counts less.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import buoy.trace
from buoy.torch import GradScaler
from buoy.torch.features import record
from buoy.torch.features.record import SELDOM
from buoy.trace import Recorder
from buoy.trace.record import EVERY

BUDGET = 0.02  # of the step


def parameters(size: int) -> list[torch.nn.Parameter]:
    """Make a hundred tensors of so many elements together, with gradients."""
    made = [torch.nn.Parameter(torch.zeros(size // 100)) for _ in range(100)]
    for param in made:
        param.grad = torch.randn_like(param) * 1e-3
    return made


def stepper(
    params: list[torch.nn.Parameter],
    policy: str | None,
    recorder: Recorder | None,
    clip: bool,
) -> Callable[[int], float]:
    """Make a function that steps at a given turn and says how long that took."""
    optimizer = torch.optim.AdamW(params, lr=0.0, fused=True)
    # A scale of 1, always: the fused kernel divides these gradients at every step.
    fixed = {"init_scale": 1.0, "max_scale": 1.0}
    if policy is None:
        scaler = GradScaler("cpu", trace=recorder, **fixed)
    else:
        rule = buoy.policy(policy, **fixed)
        scaler = GradScaler("cpu", policy=rule, trace=recorder)
    loss = torch.ones((), requires_grad=True)

    def step(turn: int) -> float:
        scaler._loss_scale.turn = turn
        scaler.scale(loss)
        start = time.process_time()
        if clip:
            scaler.clip_grad_norm_(optimizer, 1e9)
        scaler.step(optimizer)
        scaler.update()
        return time.process_time() - start

    return step


def extra(
    params: list[torch.nn.Parameter],
    policy: str | None,
    turn: int,
    rounds: int,
    *,
    clip: bool,
    every: int = EVERY,
) -> tuple[float, float]:
    """Measure what recording adds to a step of one kind, and the step without it."""
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder) / "run.buoy", every=every)
        off = stepper(params, policy, None, clip)
        on = stepper(params, policy, recorder, clip)
        off(turn)
        on(turn)
        added = []
        plain = []
        for i in range(rounds):
            if i % 2:
                without = off(turn)
                recorded = on(turn)
            else:
                recorded = on(turn)
                without = off(turn)
            added.append(recorded - without)
            plain.append(without)
        recorder.close()
    return statistics.median(added), statistics.median(plain)


def measure(
    params: list[torch.nn.Parameter], policy: str | None, rounds: int, *, clip: bool
) -> None:
    """Print the share for one way to step."""
    tiny = parameters(1000)
    note, _ = extra(tiny, policy, 1, 100 * rounds, clip=clip)
    _, base = extra(params, policy, 1, rounds, clip=clip, every=0)  # of most steps
    look, _ = extra(params, policy, SELDOM, rounds, clip=clip, every=0)
    both, _ = extra(params, policy, SELDOM, rounds, clip=clip, every=1)
    parts = {"note": note, "look": look / SELDOM, "count": (both - look) / EVERY}
    share = sum(parts.values()) / base
    held = "holds" if share <= BUDGET else "DOES NOT HOLD"
    way = "clipped" if clip else "unclipped"
    words = ", ".join(f"{name} {took * 1e3:.3f}" for name, took in parts.items())
    print(
        f"{policy or 'torch':9s} {way:10s} step {base * 1e3:6.1f} ms; "
        f"recording adds {100 * share:5.2f} %  budget {100 * BUDGET:.0f} %  {held}"
        f"  ({words} ms per step)"
    )


def rows(count: int = 100_000) -> None:
    """Print what a row costs the thread that trains, and in the file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.buoy"
        with Recorder(path, queue=10**6) as recorder:
            start = time.process_time()
            for i in range(count):
                recorder.step(scale=1.1 + i, applied=True, norm=1 / (i + 1), amax=1.0)
            took = (time.process_time() - start) / count
        start = time.process_time()
        buoy.trace.load(path)
        read = time.process_time() - start
        size = path.stat().st_size / count
    print(f"a row: {took * 1e6:.1f} us, {size:.0f} bytes; {count:,} read: {read:.2f} s")


def main() -> None:
    """Measure, and print what every kind of step costs and what that adds up to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=30_000_000)
    parser.add_argument("--rounds", type=int, default=21)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    record._CHEAP = 0  # tiny tensors are looked at as seldom as large ones
    params = parameters(chosen.parameters)
    print(f"torch {torch.__version__}, 1 thread, CPU, {chosen.parameters:,} parameters")
    for policy in (None, "headroom"):
        for clip in (True, False):
            measure(params, policy, chosen.rounds, clip=clip)
    rows()


if __name__ == "__main__":
    main()
