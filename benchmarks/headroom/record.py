"""Record gradient traces from small FP32 trainings.

Per step we keep log2 of the largest weight gradient, of the norm of all and of |loss|;
per block of `BLOCK` steps, how many weight gradients and activation gradients (hooked
module outputs, every `EVERY` steps) fall into each binade.

    python -m benchmarks.headroom.record [NAME ...]      writes traces/NAME.json.gz
"""

import gzip
import json
import math
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.headroom import fresh, untouched  # noqa: F401 - enter their tasks
from benchmarks.headroom.split import ALL
from benchmarks.headroom.tasks import TASKS

BLOCK = 50
EVERY = 5
LOW = -110
HIGH = 40
HERE = Path(__file__).parent / "traces"


class Meter:
    """Count |values| per binade, block by block."""

    def __init__(self, steps: int) -> None:
        self.counts = np.zeros((-(-steps // BLOCK), HIGH - LOW), np.int64)

    def add(self, t: int, values: Tensor) -> None:
        exponent = np.frexp(values.detach().numpy().ravel())[1] - 1
        exponent = exponent[values.detach().numpy().ravel() != 0]
        rows = np.bincount(np.clip(exponent, LOW, HIGH - 1) - LOW, minlength=HIGH - LOW)
        self.counts[t // BLOCK] += rows


def log2(x: float) -> float:
    """Give log2 of |x|, and -200 where there is nothing."""
    return math.log2(abs(x)) if x else -200.0


def pack(counts: np.ndarray) -> dict[str, object]:
    """Trim the empty binades on both sides."""
    used = np.flatnonzero(counts.sum(0))
    lo = int(used[0])
    hi = int(used[-1]) + 1
    return {"low": lo + LOW, "counts": counts[:, lo:hi].tolist()}


def record(name: str) -> dict[str, object]:
    """Train one task and return its trace."""
    torch.manual_seed(zlib.crc32(name.encode()))
    modules, loss_at, lr, steps = TASKS[name]()
    params = [p for m in modules for p in m.parameters()]
    optimizer = torch.optim.Adam(params, lr, eps=1e-15)
    weights = Meter(steps)
    acts = Meter(steps)
    look = [False, 0]

    def tap(module: nn.Module, args: object, out: object) -> None:
        out = out[0] if isinstance(out, tuple) else out
        if look[0] and isinstance(out, Tensor) and out.requires_grad:
            out.register_hook(lambda g: acts.add(look[1], g.contiguous()))

    for m in modules:
        for leaf in m.modules():
            if not list(leaf.children()):
                leaf.register_forward_hook(tap)
    amax = []
    norms = []
    losses = []
    for t in range(steps):
        look[:] = [t % EVERY == 0 or t % EVERY == 1, t]
        optimizer.zero_grad()
        loss = loss_at(t)
        loss.backward()
        grads = [p.grad for p in params if p.grad is not None]
        amax.append(log2(max(float(g.abs().max()) for g in grads)))
        norms.append(log2(float(nn.utils.get_total_norm(grads))))
        losses.append(log2(loss.item()))
        if look[0]:
            weights.add(t, torch.cat([g.ravel() for g in grads]))
        optimizer.step()
    rounded = lambda xs: [round(64 * x) for x in xs]  # noqa: E731
    return {
        "name": name, "steps": steps, "block": BLOCK, "unit": "1/64 binade",
        "amax_log2": rounded(amax), "norm_log2": rounded(norms),
        "loss_log2": rounded(losses),
        "weights": pack(weights.counts), "activations": pack(acts.counts),
    }  # fmt: skip


def main() -> None:
    """Record the named tasks, or all of them."""
    torch.set_num_threads(1)
    HERE.mkdir(exist_ok=True)
    for name in sys.argv[1:] or ALL:
        start = time.perf_counter()
        text = json.dumps(record(name), separators=(",", ":"))
        blob = gzip.compress(text.encode(), 9, mtime=0)
        (HERE / f"{name}.json.gz").write_bytes(blob)
        print(
            f"{name:16} {len(blob) / 1e3:6.1f} kB, {time.perf_counter() - start:.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
