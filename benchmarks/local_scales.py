"""A network that no one scale trains, and local scales that do.

The forward pass is that of a plain residual network of 12 blocks.  On the way back
each block multiplies the gradient by 8: it spans 36 binades of FP16's 40, and what
lies within one block needs more than the rest.  Adam does not mind: FP32 trains it.

    python -m benchmarks.local_scales [--low N] [--high N]

It trains with every scale from 2^-24 to 2^40, or from 2^low to 2^high, then with local
scales.
"""

import argparse
from typing import Any

import torch
from torch import nn

from buoy.torch import GradScaler, local_scales

DEPTH, WIDTH, OUTPUTS, BATCH = 12, 24, 8, 64
STEPS, RATE = 80, 2e-3


class Steeper(torch.autograd.Function):
    """Leave the value alone, multiply the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gain: float) -> torch.Tensor:
        """Keep the value."""
        ctx.gain = gain
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Multiply."""
        return grad * ctx.gain, None


class Block(nn.Module):
    """Two layers beside a residual, and a steeper way back."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gain = gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the block."""
        out = x + 0.3 * self.second(torch.tanh(self.first(x)))
        return Steeper.apply(out, self.gain)


class Net(nn.Module):
    """A stem, twelve blocks, a head."""

    def __init__(self, gain: float = 8.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Block(gain) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the network."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Make the one batch that is learnt: arithmetic differs, luck does not."""
    source = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, 4, generator=source)
    mix = torch.randn(4, OUTPUTS, generator=source)
    return x, torch.sin(x @ mix)


def train(
    scaler: GradScaler,
    *,
    half: bool = True,
    local: bool = False,
    gain: float = 8.0,
    hopeless: int | None = None,
) -> tuple[float, int]:
    """Train; give the last loss, in FP32, and the number of updates.

    With `hopeless`, give up when so many first steps were all skipped.
    """
    model = Net(gain)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, eps=1e-30)
    rate = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, STEPS)
    if local:
        local_scales(model, "blocks", scaler=scaler)
    (x, y), applied = data(), 0

    def step() -> None:
        with torch.autocast("cpu", torch.float16, enabled=half):
            out = model(x)
        scaler.scale(nn.functional.mse_loss(out.float(), y)).backward()

    for number in range(STEPS):
        if number == hopeless and not applied:
            break
        scaler.run(step, optimizer, retries=4 if local else 0)
        last = scaler.last_step
        if last is not None and last.applied:
            applied += 1
            rate.step()
    with torch.no_grad():
        return nn.functional.mse_loss(model(x), y).item(), applied


def in_fp32(*, gain: float = 8.0) -> tuple[float, int]:
    """Train in FP32."""
    return train(GradScaler("cpu", enabled=False), half=False, gain=gain)


def with_one_scale(exponent: int, *, hopeless: int | None = None) -> tuple[float, int]:
    """Train in FP16 with one scale that does not move."""
    scaler = GradScaler(
        "cpu",
        policy="static",
        init_scale=2.0**exponent,
        on_stuck=lambda _: None,  # that nothing is learned is what is shown
    )
    return train(scaler, hopeless=hopeless)


def main() -> None:
    """Print the sweep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--low", type=int, default=-24)
    parser.add_argument("--high", type=int, default=40)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    wanted, _ = in_fp32()
    print(f"FP32                     loss {wanted:.4f}")
    for exponent in range(chosen.low, chosen.high + 1):
        loss, applied = with_one_scale(exponent)
        off = 100 * (loss / wanted - 1)
        print(
            f"FP16, scale 2^{exponent:<4}       loss {loss:.4f} ({off:+.1f} %), "
            f"{applied} of {STEPS} steps applied"
        )
    for policy in (None, "headroom"):
        for local in (False, True):
            loss, applied = train(GradScaler("cpu", policy=policy), local=local)
            off = 100 * (loss / wanted - 1)
            name = f"{policy or 'torch'}{', local scales' if local else ''}"
            print(
                f"FP16, {name:<20} loss {loss:.4f} ({off:+.3f} %), "
                f"{applied} of {STEPS} steps applied"
            )


if __name__ == "__main__":
    main()
