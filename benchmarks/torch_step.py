"""What a step costs with Buoy, as ratios to torch's scaler in one interleaved run.

    python benchmarks/torch_step.py [--rounds N] [--threads N] [--parameters N] ...

Every figure is the median over rounds of the ratio of two measurements taken back to
back, in time spent on the CPU (with several threads: by the wall clock), so that a
neighbour on the machine counts less.  With Headroom it is the mean over 32 steps, two
cycles of what it measures, and the slowest step of a cycle is shown against the median
of all.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from buoy import Headroom
from buoy.torch import GradScaler

CYCLE = 16  # steps, in which each of Headroom's measurements is taken
Stock = torch.amp.GradScaler


def parameters(tensors: int, size: int) -> list[torch.nn.Parameter]:
    """Make parameters with gradients, as a backward pass would have left them."""
    made = [torch.nn.Parameter(torch.randn(size)) for _ in range(tensors)]
    for param in made:
        param.grad = torch.randn(size) * 1e-3
    return made


def seconds(work: Callable[[], object], repeat: int) -> float:
    """Time so many calls: on the CPU's clock, or with threads by the wall."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    for _ in range(repeat):
        work()
    return (clock() - start) / repeat


def on_cpu(work: Callable[[], object]) -> float:
    """Time one call on the CPU's clock."""
    start = time.process_time()
    work()
    return time.process_time() - start


class Compared(NamedTuple):
    """Two measurements, by their medians."""

    ratio: float  # not of the medians: the median of the ratios
    ours: float  # seconds
    other: float  # seconds


def ratio(
    ours: Callable[[], object], other: Callable[[], object], rounds: int, repeat: int
) -> Compared:
    """Measure both in turns."""
    ours()
    other()
    mine = []
    theirs = []
    for i in range(rounds):
        if i % 2:
            mine.append(seconds(ours, repeat))
            theirs.append(seconds(other, repeat))
        else:
            theirs.append(seconds(other, repeat))
            mine.append(seconds(ours, repeat))
    each = [a / b for a, b in zip(mine, theirs, strict=True)]
    return Compared(*map(statistics.median, (each, mine, theirs)))


def started(kind: type[Stock], **options: object) -> Stock:
    """Make a scaler at scale 1, so that nothing drifts."""
    if "policy" not in options:
        options.update(init_scale=1.0, growth_interval=10**9)
    return kind("cpu", **options)


def plain_step(scaler: Stock, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """Scale a loss, check the gradients that are there, and step."""
    loss = torch.ones((), requires_grad=True)

    def step() -> None:
        scaler.scale(loss)
        scaler.step(optimizer)
        scaler.update()

    return step


def with_clipping(params: list[torch.nn.Parameter]) -> dict[str, Callable[[], object]]:
    """Check, unscale, clip and a fused AdamW step, in three ways."""
    optimizer = torch.optim.AdamW(params, lr=1e-6, fused=True)
    stock = started(Stock)
    loss = torch.ones((), requires_grad=True)

    def clipped(scaler: GradScaler) -> Callable[[], object]:
        def step() -> None:
            scaler.scale(loss)
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()

        return step

    def torchs() -> None:
        stock.scale(loss)
        stock.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        stock.step(optimizer)
        stock.update()

    def unscaled() -> None:
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()

    grads = [param.grad for param in params]

    def bare() -> None:
        torch._foreach_norm(grads, 2.0)
        bare_step()

    def bare_step() -> None:
        optimizer.grad_scale = torch.ones(())
        optimizer.found_inf = torch.zeros(())
        optimizer.step()
        del optimizer.grad_scale
        del optimizer.found_inf

    def bare_largest() -> None:
        for grad in grads:
            torch.linalg.vector_norm(grad)
            torch.aminmax(grad)
        bare_step()

    return {
        "torch": torchs,
        "unscaled": unscaled,
        "bare": bare,
        "bare headroom": bare_largest,
        "buoy": clipped(started(GradScaler)),
        "headroom": clipped(started(GradScaler, policy=still())),
    }


def still() -> Headroom:
    """Make a policy that measures everything and stays at scale 1."""
    return Headroom(init_scale=1.0, min_scale=1.0, max_scale=1.0)


def without_clipping(
    params: list[torch.nn.Parameter], *, fused: bool
) -> dict[str, Callable[[], object]]:
    """Check and step."""
    optimizer = torch.optim.AdamW(params, lr=1e-6, fused=fused, foreach=not fused)
    scalers = {
        "buoy": started(GradScaler),
        "torch": started(Stock),
        "headroom": started(GradScaler, policy=still()),
    }
    return {name: plain_step(one, optimizer) for name, one in scalers.items()}


def tiny(kind: str) -> dict[str, Callable[[], object]]:
    """Scale + step + update on 20 tensors of 100 elements, with an idle optimizer."""
    params = parameters(20, 100)
    optimizer: torch.optim.Optimizer
    if kind == "fused":
        optimizer = torch.optim.AdamW(params, lr=0.0, fused=True)
    elif kind == "sgd":
        optimizer = torch.optim.SGD(params, lr=0.0)
    else:
        optimizer = Idle(params)
    scalers = {"buoy": started(GradScaler), "torch": started(Stock)}
    return {name: plain_step(one, optimizer) for name, one in scalers.items()}


class Idle(torch.optim.Optimizer):
    """Steps in no time, so that only the scaler is measured."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        super().__init__(params, {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Do nothing."""


def training(rows: int, width: int, *, scale: bool) -> Callable[[], object]:
    """A whole step of a model that spends its time multiplying matrices."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(width, width) for _ in range(6)]
    model = torch.nn.Sequential(*layers)
    x = torch.randn(rows, width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    scaler = GradScaler("cpu", init_scale=1.0, enabled=scale)

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def survey(params: list[torch.nn.Parameter]) -> dict[str, Callable[[], object]]:
    """The survey against one plain read of the gradients."""
    from buoy._backends.torch.gradients import gather
    from buoy._backends.torch.inspection import inspect

    optimizer = Idle(params)
    inverse = torch.ones(())
    grads = [param.grad for param in params]
    return {
        "buoy": lambda: inspect(gather(optimizer), inverse, order=2.0, may_read=True),
        "read": lambda: [grad.sum() for grad in grads],
    }


TENSORS = [(10, 1000), (100, 1000), (1000, 1000), (3000, 1000)]
SIZES = [(10, 10_000), (10, 100_000), (10, 1_000_000), (10, 3_000_000)]


def costs(shape: tuple[int, int], rounds: int) -> dict[str, float]:
    """Take the milliseconds of a clipped step on so many tensors of such a size."""
    ways = with_clipping(parameters(*shape))
    found = ratio(ways["buoy"], ways["torch"], rounds, 1)
    return {"buoy": found.ours * 1e3, "torch": found.other * 1e3}


def sweep(rounds: int, most: int) -> None:
    """Print what a clipped step costs against the number of tensors and elements.

    Shapes of more than `most` elements are left out.
    """
    print("tensors x elements: ms per clipped step with Buoy and with torch's scaler,")
    print("and Buoy's microseconds per tensor, or nanoseconds per element")
    for shapes in (TENSORS, SIZES):
        for tensors, size in shapes:
            if tensors * size > most:
                continue
            took = costs((tensors, size), rounds)
            if shapes is TENSORS:
                each = took["buoy"] * 1e3 / tensors
            else:
                each = took["buoy"] * 1e6 / (tensors * size)
            print(
                f"  {tensors:5d} x {size:8d}  {took['buoy']:8.2f}  "
                f"{took['torch']:8.2f}  {each:8.2f}"
            )


def line(what: str, budget: float, found: Compared) -> None:
    """Print one budget and whether it holds."""
    held = "holds" if round(found.ratio, 2) <= budget else "DOES NOT HOLD"
    print(
        f"{what:58s} {found.ratio:5.2f}  budget {budget:4.2f}  {held:14s}"
        f" ({found.ours * 1e3:.3f} ms : {found.other * 1e3:.3f} ms)"
    )


def cycles(
    ours: Callable[[], object], other: Callable[[], object], rounds: int
) -> tuple[Compared, Compared]:
    """Compare means over two cycles of steps, and the slowest step with the median.

    Both take turns step by step; the slowest is by its median over all cycles.  A first
    cycle, in which hints look at the loop and memory is allocated, is not counted.
    """
    for _ in range(CYCLE):
        ours()
        other()
    steps: list[float] = []  # ours, of all cycles
    means: list[Compared] = []
    for _ in range(max(1, rounds // 7)):
        mine = []
        theirs = []
        for _ in range(2 * CYCLE):
            mine.append(on_cpu(ours))
            theirs.append(on_cpu(other))
        own = statistics.mean(mine)
        stock = statistics.mean(theirs)
        means.append(Compared(own / stock, own, stock))
        steps += mine
    mean = Compared(*map(statistics.median, zip(*means, strict=True)))
    usual = statistics.median(steps)
    slowest = max(statistics.median(steps[i::CYCLE]) for i in range(CYCLE))
    return mean, Compared(slowest / usual, slowest, usual)


def main() -> None:
    """Measure everything and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--parameters", type=int, default=30_000_000)
    parser.add_argument("--width", type=int, default=384)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    big = parameters(100, chosen.parameters // 100)
    rounds = chosen.rounds
    print(f"torch {torch.__version__}, {chosen.threads} thread(s), CPU")

    show_clipping(big, rounds)
    show_no_clipping(big, rounds)
    ways = survey(big)
    line("survey / plain read", 1.5, ratio(ways["buoy"], ways["read"], rounds, 1))
    for rows, what in ((768, ""), (2048, " (no budget)")):
        with_it = training(rows, chosen.width, scale=True)
        without = training(rows, chosen.width, scale=False)
        found = ratio(with_it, without, rounds * 4, 1)
        line(f"whole training step of {rows} rows / no scaling{what}", 1.01, found)
    show_tiny(rounds)
    sweep(rounds, chosen.parameters)


def show_clipping(params: list[torch.nn.Parameter], rounds: int) -> None:
    """Print the steps that clip, on large tensors."""
    ways = with_clipping(params)

    def compared(ours: str, other: str) -> Compared:
        return ratio(ways[ours], ways[other], rounds * 3, 1)

    step = "check+unscale+clip+fused AdamW"
    line(f"{step} / its two kernels alone", 1.05, compared("buoy", "bare"))
    found = compared("bare", "torch")
    line("  its two kernels alone / torch (no budget)", 1.0, found)
    found = compared("bare headroom", "torch")
    line("  and with the largest gradient (no budget)", 1.0, found)
    line(f"{step} / clip without scaling", 1.0, compared("buoy", "unscaled"))
    mean, slowest = cycles(ways["headroom"], ways["torch"], rounds)
    line("the same with policy='headroom', 32 steps / torch", 0.80, mean)
    line("  the slowest step of a cycle / the median step", 1.2, slowest)


def show_no_clipping(params: list[torch.nn.Parameter], rounds: int) -> None:
    """Print the steps that do not clip, on large tensors."""
    ways = without_clipping(params, fused=True)
    found = ratio(ways["buoy"], ways["torch"], rounds * 3, 1)
    line("check+fused AdamW / torch", 1.0, found)
    mean, slowest = cycles(ways["headroom"], ways["torch"], rounds)
    line("the same with policy='headroom', 32 steps / torch", 1.0, mean)
    line("  the slowest step of a cycle / the median step", 1.2, slowest)
    ways = without_clipping(params, fused=False)
    found = ratio(ways["buoy"], ways["torch"], rounds, 1)
    line("check+unscale+foreach AdamW / torch (no budget)", 1.05, found)


def show_tiny(rounds: int) -> None:
    """Print the steps of tiny tensors: the scaler's own time."""
    for kind in ("idle", "sgd", "fused"):
        ways = tiny(kind)
        found = ratio(ways["buoy"], ways["torch"], rounds * 3, 60)
        line(f"scale+step+update, 20 x 100, {kind} / torch", 1.1, found)
    ways = with_clipping(parameters(20, 100))
    found = ratio(ways["buoy"], ways["torch"], rounds * 3, 60)
    line("scale+clip+step+update, 20 x 100, fused / torch", 1.0, found)


if __name__ == "__main__":
    main()
