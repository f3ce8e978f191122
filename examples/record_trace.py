"""Record a trace by hand: a small regression in SI units, in FP32.

The trace that comes with Buoy was made by this.  The task is y = unit * sin(x W1 +
phase) W2, the network 4-48-48-64 with tanh.  Sizes are rounded to a hundredth of a
binade, to keep the file small.

    python examples/record_trace.py FILE
    buoy replay FILE -p torch -p headroom
"""

import math
import sys

import torch
from torch import nn

import buoy.trace
from buoy.trace import Histogram, Trace

UNIT = 1e-5
STEPS = 800
EVERY = 50  # steps between histograms


def main(path: str) -> None:
    """Train once and write what the gradients were."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    first = torch.randn(4, 32)
    phase = torch.randn(32)
    second = torch.randn(32, 64) / math.sqrt(32)
    net = nn.Sequential(
        nn.Linear(4, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 64)
    )
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3, eps=1e-15)
    amax = []
    losses = []
    weights = []
    activations = []
    for step in range(STEPS):
        x = torch.randn(128, 4)
        y = UNIT * (torch.sin(x @ first + phase) @ second)
        optimizer.zero_grad()
        between = _forward(net, x)
        loss = nn.functional.mse_loss(between[-1] * UNIT, y)
        loss.backward()
        of_weights = [p.grad for p in net.parameters()]
        of_activations = [a.grad for a in between]
        amax.append(_log2(max(g.abs().max() for g in of_weights + of_activations)))
        losses.append(_log2(loss.detach()))
        if step % EVERY == 0:
            weights.append(_histogram(of_weights, step))
            activations.append(_histogram(of_activations, step))
        optimizer.step()
    trace = Trace(
        amax_log2=amax,
        loss_log2=losses,
        weight_histograms=weights,
        activation_histograms=activations,
        name=f"field regression in SI units ({UNIT:g}), FP32",
    )
    buoy.trace.write(trace, path)


def _forward(net: nn.Sequential, x: torch.Tensor) -> list[torch.Tensor]:
    between = []
    for layer in net:
        x = layer(x)
        x.retain_grad()
        between.append(x)
    return between


def _log2(x: torch.Tensor) -> float:
    return round(math.log2(float(x)), 2)


def _histogram(gradients: list[torch.Tensor], step: int) -> Histogram:
    sizes = torch.cat([g.abs().flatten() for g in gradients]).double()
    binades = sizes[sizes > 0].log2().floor().long()
    low = int(binades.min())
    return Histogram(step, low, tuple(torch.bincount(binades - low).tolist()))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/record_trace.py FILE")
    main(sys.argv[1])
