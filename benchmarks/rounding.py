"""BF16 weights, updated four ways: what becomes of a small training.

    python benchmarks/rounding.py [--steps N] [--seeds N]

Updates of Adam at a small learning rate are below half a unit in the last place of most
weights, so rounding to the nearest loses them.  Rounding by chance does not, nor does
keeping FP32 masters.  Printed is the loss at the end, over the last 50 steps.
"""

import argparse
import statistics

import torch

from buoy.torch import MasterWeights

WAYS = ("fp32", "nearest", "stochastic", "masters")


def network() -> torch.nn.Module:
    """Make a small network."""
    return torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
    )


def final_loss(way: str, steps: int, seed: int = 0) -> float:
    """Fit a small network to another; return the mean loss of the last 50 steps."""
    torch.manual_seed(seed)
    teacher = network()
    model = network()
    dtype = torch.float32 if way == "fp32" else torch.bfloat16
    model.to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    if way == "masters":
        MasterWeights(optimizer)
    elif way != "fp32":
        MasterWeights(optimizer, rounding=way)
    losses = []
    for _ in range(steps):
        x = torch.randn(64, 16)
        with torch.no_grad():
            y = 4.0 * teacher(x)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x.to(dtype)).float(), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return statistics.mean(losses[-50:])


def main() -> None:
    """Print the losses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for way in WAYS:
        runs = [final_loss(way, options.steps, seed) for seed in range(options.seeds)]
        print(f"{way:<12}", *(f"{loss:.4f}" for loss in runs))


if __name__ == "__main__":
    main()
