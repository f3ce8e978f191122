"""What a JAX step costs with Buoy, as ratios to flax's DynamicScale and to jmp.

    python benchmarks/jax_step.py [--processes N] [--rounds N] [--width N] ...

The same network in FP16, the same AdamW, the same clipping, each step as its own
documentation writes it, and every state donated.  A process measures all ways in
turns, a step at a time; its figure is the median over rounds of the ratio of two
steps of one round, in time spent on the CPU, so that neighbours on the machine do not
count (by the wall clock it is printed too).  Where a process finds its buffers in
memory is its own affair, and may cost a page fault for every 4 kB and step: so the
figure that counts is the median over several fresh processes, each of which is shown
with its faults.  Compile time is tracing, XLA and the first step together.

First it prints how many kernels and collectives a step launches, for 16 leaves, in the
programs that accelerators get, which have no branches.
"""

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import jmp
import optax
from flax.training.dynamic_scale import DynamicScale

import buoy.jax

MAX_NORM = 1.0
Params = dict[str, jax.Array]
Carry = Any  # what goes from step to step: a tree of arrays, each way's own
Step = Callable[[Carry, jax.Array], tuple[Carry, jax.Array]]


def network(width: int, layers: int) -> Params:
    """Make the parameters of a plain deep network."""
    params = {}
    for i, key in enumerate(jax.random.split(jax.random.key(0), layers)):
        params[f"w{i}"] = jax.random.normal(key, (width, width)) / width**0.5
        params[f"b{i}"] = jnp.zeros(width)
    return params


def loss_fn(params: Params, x: jax.Array) -> jax.Array:
    """Compute in FP16, and the loss in float32."""
    half = buoy.jax.cast(params, "float16")
    out = x.astype(jnp.float16)
    for i in range(len(params) // 2):
        out = jnp.tanh(out @ half[f"w{i}"] + half[f"b{i}"])
    return jnp.mean(jnp.square(out.astype(jnp.float32)))


def with_buoy(params: Params, policy: str) -> tuple[Carry, Step]:
    """Ours."""
    tx = buoy.jax.loss_scaled(optax.adamw(1e-4), policy, max_norm=MAX_NORM)

    def step(carry: Carry, x: jax.Array) -> tuple[Carry, jax.Array]:
        params, state = carry
        loss, grads = buoy.jax.value_and_grad(loss_fn)(state, params, x)
        updates, state = tx.update(grads, state, params, value=loss)
        return (optax.apply_updates(params, updates), state), loss

    return (params, tx.init(params)), step


def clipped_adamw() -> optax.GradientTransformation:
    """Clip by the global norm, then AdamW."""
    return optax.chain(optax.clip_by_global_norm(MAX_NORM), optax.adamw(1e-4))


def with_flax(params: Params) -> tuple[Carry, Step]:
    """As flax's examples do: update, then select."""
    tx = clipped_adamw()
    scaler = DynamicScale(
        fin_steps=jnp.zeros((), jnp.int32), scale=jnp.float32(2.0**10)
    )

    def step(carry: Carry, x: jax.Array) -> tuple[Carry, jax.Array]:
        params, state, scaler = carry
        grad_fn = scaler.value_and_grad(loss_fn)
        scaler, finite, loss, grads = grad_fn(params, x)
        updates, new_state = tx.update(grads, state, params)
        new_params = optax.apply_updates(params, updates)
        kept_params, kept_state = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old),
            (new_params, new_state),
            (params, state),
        )
        return (kept_params, kept_state, scaler), loss

    return (params, tx.init(params), scaler), step


def with_jmp(params: Params) -> tuple[Carry, Step]:
    """As jmp's README does."""
    tx = clipped_adamw()
    scaler = jmp.DynamicLossScale(jnp.float32(2.0**10))

    def step(carry: Carry, x: jax.Array) -> tuple[Carry, jax.Array]:
        params, state, scaler = carry

        def scaled_loss(params: Params) -> jax.Array:
            return scaler.scale(loss_fn(params, x))

        loss, grads = jax.value_and_grad(scaled_loss)(params)
        grads = scaler.unscale(grads)
        finite = jmp.all_finite(grads)
        updates, new_state = tx.update(grads, state, params)
        new_params = optax.apply_updates(params, updates)
        kept = jmp.select_tree(finite, (new_params, new_state), (params, state))
        return (*kept, scaler.adjust(finite)), scaler.unscale(loss)

    return (params, tx.init(params), scaler), step


def without(params: Params) -> tuple[Carry, Step]:
    """No scaling and no check at all."""
    tx = clipped_adamw()

    def step(carry: Carry, x: jax.Array) -> tuple[Carry, jax.Array]:
        params, state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    return (params, tx.init(params)), step


WAYS: dict[str, Callable[[Params], tuple[Carry, Step]]] = {
    "buoy headroom": lambda params: with_buoy(params, "headroom"),
    "buoy backoff": lambda params: with_buoy(params, "backoff"),
    "flax": with_flax,
    "jmp": with_jmp,
    "unscaled": without,
}


class Launches(NamedTuple):
    """What a step launches on a device."""

    kernels: int
    collectives: int


# Counted are the instructions of the entry computation: those inside a fusion are one
# kernel.  A device runs each of them (a fusion, a dot, a reduction, a copy, a custom
# call ...) but these, which only name or place memory, and but the end of a collective
# or copy that was counted where it started.
NO_KERNELS = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}
COLLECTIVES = re.compile(r"(all|reduce|collective|ragged)-(?!precision|window)")
INSTRUCTION = re.compile(
    r"^  (?:ROOT )?\S+ = (?:\(.*?\)|\S+) ([a-z][a-z-]*)\(", re.MULTILINE
)


def launches_of(program: str) -> Launches:
    """Count the instructions of a compiled program that a device runs."""
    entry = re.sub(r"/\*.*?\*/", "", program.partition("\nENTRY ")[2])
    kinds = [kind for kind in INSTRUCTION.findall(entry) if not kind.endswith("-done")]
    hidden = {"conditional", "while"} & set(kinds)
    if hidden:
        raise ValueError(f"What runs inside a {hidden.pop()} would not be counted.")
    collectives = [kind for kind in kinds if COLLECTIVES.match(kind)]
    kernels = [kind for kind in kinds if kind not in NO_KERNELS]
    return Launches(len(kernels) - len(collectives), len(collectives))


def launches(name: str, width: int = 256, layers: int = 8) -> Launches:
    """Compile a step as for an accelerator, two leaves for each layer, and count."""
    carry, step = WAYS[name](network(width, layers))
    with mock.patch("jax.default_backend", return_value="gpu"):  # no branches
        program = jax.jit(step).lower(carry, jnp.zeros((32, width))).compile()
    return launches_of(program.as_text())


def show_launches() -> None:
    """Print how many kernels a step launches; jmp's class cannot be lowered."""
    for name in ("unscaled", "flax", "buoy backoff", "buoy headroom"):
        kernels, collectives = launches(name)
        print(f"  {name:14s} {kernels:5d} kernels, {collectives} collectives")


def compile_times(params: Params, x: jax.Array, rounds: int) -> dict[str, list[float]]:
    """Trace and compile each way anew, in turns; seconds on the CPU's clock."""
    took: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name, make in WAYS.items():
            carry, step = make(params)
            jax.clear_caches()
            start = time.process_time()
            # Not `.lower().compile()`: jmp's class cannot be lowered.
            jax.block_until_ready(jax.jit(step)(carry, x))
            took[name].append(time.process_time() - start)
    return took


class Clocks:
    """What each step of one way took."""

    def __init__(self) -> None:
        self.cpu: list[float] = []
        self.wall: list[float] = []
        self.faults: list[float] = []

    def run(self, step: Step, carry: Carry, x: jax.Array) -> Carry:
        """Take a step, and note its time on the CPU, on the wall, and its faults."""
        faults = page_faults()
        wall = time.perf_counter()
        cpu = time.process_time()
        carry, _ = jax.block_until_ready(step(carry, x))
        self.cpu.append(time.process_time() - cpu)
        self.wall.append(time.perf_counter() - wall)
        self.faults.append(page_faults() - faults)
        return carry


def page_faults() -> int:
    """Return how many page faults this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def step_times(params: Params, x: jax.Array, rounds: int) -> dict[str, Clocks]:
    """Run each way in turns, a step at a time."""
    carries = {}
    steps = {}
    for name, make in WAYS.items():
        carry, step = make(params)
        steps[name] = jax.jit(step, donate_argnums=0)
        carries[name], _ = steps[name](jax.tree.map(jnp.copy, carry), x)
    took = {name: Clocks() for name in WAYS}
    names = list(WAYS)
    for i in range(rounds):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            carries[name] = took[name].run(steps[name], carries[name], x)
    return took


def ratio(took: dict[str, list[float]], ours: str, others: list[str]) -> float:
    """Return the median ratio to the fastest of the others (by its median)."""
    best = min(others, key=lambda name: statistics.median(took[name]))
    pairs = zip(took[ours], took[best], strict=True)
    return statistics.median(a / b for a, b in pairs)


OURS = ("buoy headroom", "buoy backoff")
PEERS = ["flax", "jmp"]


Figures = dict[str, dict[str, float]]  # by what is measured, and the name of a way


def one_process(params: Params, x: jax.Array, rounds: int) -> Figures:
    """Measure the step here, in this process; numbers that can be printed as JSON."""
    clocks = step_times(params, x, rounds)
    cpu = {name: clock.cpu for name, clock in clocks.items()}
    wall = {name: clock.wall for name, clock in clocks.items()}
    return {
        "ms": {name: statistics.median(times) * 1e3 for name, times in cpu.items()},
        "faults": {n: statistics.median(c.faults) for n, c in clocks.items()},
        "step": {ours: ratio(cpu, ours, PEERS) for ours in OURS},
        "wall": {ours: ratio(wall, ours, PEERS) for ours in OURS},
        "unscaled": {ours: ratio(cpu, ours, ["unscaled"]) for ours in OURS},
    }


def fresh_processes(count: int) -> list[Figures]:
    """Measure the step in several processes, one after the other, and show each."""
    found: list[Figures] = []
    for i in range(1, count + 1):
        command = [sys.executable, __file__, *sys.argv[1:], "--child"]
        run = subprocess.run(  # noqa: S603 - this very file
            command, check=True, stdout=subprocess.PIPE, text=True
        )
        figures: Figures = json.loads(run.stdout.splitlines()[-1])
        found.append(figures)
        faults = figures["faults"]
        for ours in OURS:
            print(
                f"  process {i}: {ours:14s} {figures['step'][ours]:5.2f}"
                f"  (wall {figures['wall'][ours]:5.2f}, faults a step"
                f" {faults[ours]:.0f}; flax {faults['flax']:.0f}, jmp"
                f" {faults['jmp']:.0f})",
                flush=True,
            )
    return found


def median_of(processes: list[Figures], what: str, name: str) -> float:
    """Take the median over the processes."""
    return statistics.median(figures[what][name] for figures in processes)


def line(what: str, share: float, budget: float | None = None) -> None:
    """Print one figure, its budget, and whether it holds."""
    if budget is None:
        print(f"{what:52s} {share:5.2f}")
        return
    held = "holds" if round(share, 2) <= budget else "DOES NOT HOLD"
    print(f"{what:52s} {share:5.2f}  budget {budget:4.2f}  {held}")


def transfers(params: Params, x: jax.Array) -> dict[str, int]:
    """Count the instructions of each program that use the host."""
    words = ("infeed", "outfeed", "callback", "send(", "recv(")
    found = {}
    for name, make in WAYS.items():
        carry, step = make(params)
        if name != "jmp":  # cannot be lowered
            program = jax.jit(step).lower(carry, x).compile().as_text()
            found[name] = sum(program.count(word) for word in words)
    return found


def settings() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--compile-rounds", type=int, default=7)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def show_steps(processes: list[Figures]) -> None:
    """Print the medians over all processes."""
    for name in WAYS:
        print(f"  {name:14s} {median_of(processes, 'ms', name):8.2f} ms a step")
    for ours in OURS:
        step = median_of(processes, "step", ours)
        line(f"{ours}: step / faster of flax and jmp", step, budget=1.0)
        line("  the same by the wall clock", median_of(processes, "wall", ours))
        worst = max(figures["step"][ours] for figures in processes)
        line(f"  the worst of {len(processes)} processes", worst)
        unscaled = median_of(processes, "unscaled", ours)
        line(f"{ours}: step / no scaling, with clipping", unscaled)


def show_compilation(params: Params, x: jax.Array, rounds: int) -> None:
    """Print the time of compilation, and the instructions that use the host."""
    built = compile_times(params, x, rounds)
    for name, times in built.items():
        print(f"  {name:14s} {statistics.median(times):8.2f} s to compile")
    for ours in OURS:
        share = ratio(built, ours, PEERS)
        line(f"{ours}: compile / faster of flax and jmp", share, budget=1.2)
    print("instructions that read from or write to the host:", transfers(params, x))


def main() -> None:
    """Measure everything and print it."""
    chosen = settings()
    params = network(chosen.width, chosen.layers)
    x = jax.random.normal(jax.random.key(1), (chosen.batch, chosen.width))
    if chosen.child:
        print(json.dumps(one_process(params, x, chosen.rounds)))
        return
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(f"jax {jax.__version__}, {jax.default_backend()}, {count:,} parameters")
    show_launches()
    show_steps(fresh_processes(chosen.processes))
    show_compilation(params, x, chosen.compile_rounds)


if __name__ == "__main__":
    main()
