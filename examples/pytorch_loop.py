"""A plain PyTorch loop in FP16 with Buoy's scaler, recorded, with a report.

    python examples/pytorch_loop.py [--steps N]

The task is a regression whose targets are in SI units (about 1e-5), so that most
gradients are below the smallest FP16 number, 6e-8.  The loop runs twice: without loss
scaling, and with `buoy.torch.GradScaler`.  Compared with a loop in FP32 there are four
new lines; they are marked.
"""

import argparse

import torch
from torch import nn

import buoy.report
from buoy.torch import GradScaler

UNIT = 1e-5  # of the targets


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the inputs and targets of one step."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(32, 8, generator=generator)
    return x, UNIT * (x[:, :1] - x[:, 1:2])


def train(steps: int, *, enabled: bool) -> float:
    """Train with or without loss scaling; return the mean of the last ten losses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2, eps=1e-20)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    # 1. Make a scaler.  `policy="headroom"` places the scale by measuring gradients;
    #    leave it out to keep PyTorch's own rule.
    scaler = GradScaler(
        "cpu",
        policy="headroom",
        model=model,  # for the names of parameters in messages
        trace="pytorch_loop.buoy" if enabled else None,
        enabled=enabled,
    )
    scaler.gate(scheduler)  # it advances in `update`, and not when a step is skipped
    losses = []
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            output = model(x)
        loss = nn.functional.mse_loss(output.float() * UNIT, y)
        scaler.scale(loss).backward()  # 2. Scale the loss.
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)  # 3. Step only if all gradients are finite.
        scaler.update()  # 4. Move the scale.
        losses.append(loss.item())
    if scaler.trace is not None:
        scaler.trace.close()  # writes the last steps; the end of the program would, too
        buoy.report.write([scaler.trace.path], "pytorch_loop.html")
    return sum(losses[-10:]) / 10 / UNIT**2


def main() -> None:
    """Train twice and compare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    print(f"loss without scaling: {train(steps, enabled=False):.4f}")
    print(f"loss with scaling:    {train(steps, enabled=True):.4f}")
    print("Open pytorch_loop.html: see where the scale settled, and the headroom.")


if __name__ == "__main__":
    main()
