"""What emulated FP16 costs against FP32, and against FP16 itself, on this CPU.

    python benchmarks/emulate.py [--width 512] [--rounds 11]

All ways of a line are run in turn, so that noise falls on all alike; printed is the
median of each, in time of the one thread, which neighbours do not lengthen.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import buoy
from buoy.emulate import emulate
from buoy.emulate.rounding import by_bits, by_conversion

Ways = dict[str, Callable[[], object]]


def medians(ways: Ways, rounds: int) -> dict[str, float]:
    """Run the ways in turn; return the median seconds of each."""
    took: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            start = time.thread_time()
            way()
            if turn:
                took[name].append(time.thread_time() - start)
    return {name: statistics.median(times) for name, times in took.items()}


def three(work: Callable[[torch.dtype], Callable[[], object]]) -> Ways:
    """Make the same work in FP32, emulated, and in FP16 itself."""
    plain = work(torch.float32)

    def emulated() -> None:
        with emulate("fp16"):
            plain()

    return {"fp32": plain, "emulated": emulated, "fp16": work(torch.float16)}


def product(width: int, *, backward: bool) -> Ways:
    """A matrix product, a @ b, or with both gradients."""

    def work(dtype: torch.dtype) -> Callable[[], object]:
        source = torch.Generator().manual_seed(0)

        def matrix() -> torch.Tensor:
            return torch.randn(width, width, generator=source).to(dtype)

        a = matrix()
        b = matrix()
        into = matrix()
        if not backward:
            return lambda: a @ b
        a.requires_grad_()
        b.requires_grad_()
        return lambda: (a @ b).backward(into)

    return three(work)


def perceptron(width: int) -> Ways:
    """Forward and backward of three linear layers, 128 rows."""

    def work(dtype: torch.dtype) -> Callable[[], object]:
        torch.manual_seed(0)
        layers = [m for _ in range(3) for m in (nn.Linear(width, width), nn.GELU())]
        model = nn.Sequential(*layers).to(dtype)
        x = torch.randn(128, width).to(dtype)

        def step() -> None:
            model.zero_grad()
            model(x).sum().backward()

        return step

    return three(work)


def rounding(name: str, size: int) -> Ways:
    """Two ways to round to a grid, beside one plain copy."""
    values = torch.randn(size)
    limits = buoy.FORMATS[name]
    ways: Ways = {
        "copy": values.clone,
        "bits": lambda: by_bits(limits)(values),
    }
    if name != "fp8_e4m3":
        ways["conversion"] = lambda: by_conversion(limits)(values)
    return ways


def main() -> None:
    """Measure everything and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=11)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    width = chosen.width
    rounds = chosen.rounds
    print(f"torch {torch.__version__}, 1 thread; ms")
    print(f"{'':34s}{'fp32':>9s}{'emulated':>10s}{'fp16':>9s}  fp16 / emulated")
    for what, ways in {
        f"a @ b, width {width}": product(width, backward=False),
        "  and both gradients": product(width, backward=True),
        f"3 linear + gelu, width {width}, both": perceptron(width),
        "3 linear + gelu, width 128, both": perceptron(128),
        "3 linear + gelu, width 48, both": perceptron(48),
    }.items():
        took = medians(ways, rounds)
        cells = "".join(f"{1e3 * seconds:9.2f} " for seconds in took.values())
        print(
            f"{what:34s}{cells} {took['fp16'] / took['emulated']:6.1f} x"
            f"   (emulated / fp32: {took['emulated'] / took['fp32']:.2f})"
        )
    print("rounding 2^18 numbers, us")
    for name in ("fp16", "fp8_e5m2", "fp8_e4m3fn", "fp8_e4m3"):
        took = medians(rounding(name, 2**18), 5 * rounds)
        cells = ", ".join(f"{way} {1e6 * s:.0f}" for way, s in took.items())
        print(f"  {name:12s}{cells}")


if __name__ == "__main__":
    main()
