"""A scale for each block, for a network that no single scale fits.

    python examples/local_scales.py [STEPS]

If the gradient grows by a factor in every block, its values span more powers of two
than the 40 of FP16: whatever the loss scale, one end of the network overflows or the
other underflows.  `LocalScales` runs blocks one after the other and gives each a power
of two of its own.  Between two blocks the gradient is multiplied by the ratio of
theirs; hooks divide the gradients of a block's parameters by the block's own.  Both are
exact, so `.grad` and the rest of the loop are what they were; `follow` is one more line
in the loop.

The network here multiplies the gradient by 8 in each of its 12 blocks.  FP32 trains it,
FP16 with a scaler does not, FP16 with a scaler and local scales does.

Copy `LocalScales` into your project.  Parameters must be in FP32 and belong to one
block; blocks must not write into their input (`inplace=True`).  The loss scale needs a
rule that does not measure gradients, such as torch's or a static scale: `headroom`
would lower it for gradients that local scales keep in range.  FSDP and tensor
parallelism are not supported.
"""

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from buoy.torch import GradScaler

TARGET = 11  # log2 of the largest gradient in a block; FP16 overflows at 16
RETREAT = 4.0  # powers of two, if a block overflows
SINK = 1 / 16  # powers of two per step, if its gradients shrink
SPAN = 4  # blocks over which the slope of the gradients is measured
LIMIT = 96  # the largest exponent of a block's scale: FP32 ends at 127


class Rescale(torch.autograd.Function):
    """Between two blocks: the value stays, the gradient gets the next block's scale."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, local: "LocalScales", index: int
    ) -> torch.Tensor:
        """Keep the value."""
        ctx.local = local
        ctx.index = index
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """Multiply the gradient."""
        return ctx.local.rescale(grad, ctx.index), None, None


class LocalScales(nn.Sequential):
    """A sequence of blocks, each with a scale of its own for the backward pass.

    Call `follow` once after each `scaler.update()`.  The scales are saved with the
    model.
    """

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        # log2 of the scale of each block, and of the largest gradient in it without
        # this scale; NaN until a gradient has reached the block.
        self.exponents = [0] * len(blocks)
        self.levels = [math.nan] * len(blocks)
        self._forget()
        for index, block in enumerate(blocks):
            for param in block.parameters():
                param.register_hook(self._unscale(index))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the blocks."""
        for index, block in enumerate(self):
            x = block(Rescale.apply(x, self, index))
        return Rescale.apply(x, self, len(self))

    def rescale(self, grad: torch.Tensor, index: int) -> torch.Tensor:
        """Pass a gradient from the block `index` to the one before it.

        Before the first and after the last there is none: only the loss scale.
        """
        exponents = [0, *self.exponents, 0]
        # In FP32: the factor may exceed FP16's range where the product does not.
        result = grad.float() * 2.0 ** (exponents[index] - exponents[index + 1])
        if index < len(self):
            self._left[index].append(grad.abs().amax())
        if index > 0:
            self._entered[index - 1] = result.abs().amax()
        return result.to(grad.dtype)

    def _unscale(self, index: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def hook(grad: torch.Tensor) -> torch.Tensor:
            self._left[index].append(grad.abs().amax())
            return grad / 2.0 ** self.exponents[index]

        return hook

    def follow(self) -> None:
        """Set the scales by what the last backward pass has measured."""
        for index in range(len(self)):
            self._measure(index)
        levels = self._guessed()
        for index, level in enumerate(levels):
            if math.isfinite(level):
                exponent = math.floor(TARGET - level)
                self.exponents[index] = max(-LIMIT, min(LIMIT, exponent))
        self._forget()

    def _measure(self, index: int) -> None:
        """Follow a rise at once, and a fall slowly."""
        entered = float(self._entered[index])
        left = [float(size) for size in self._left[index]]
        if not 0 < entered < math.inf:
            return  # a later block has overflowed, or there was no backward pass
        fits = all(map(math.isfinite, left))
        size = math.log2(max([entered, *left] if fits else [entered]))
        seen = size - self.exponents[index]
        level = self.levels[index]
        if math.isnan(level):
            level = seen
        if fits:
            self.levels[index] = max(seen, level - SINK)
        else:
            self.levels[index] = max(seen, level) + RETREAT

    def _guessed(self) -> list[float]:
        """Continue the slope of the first known levels to blocks not reached yet."""
        known = [i for i, level in enumerate(self.levels) if not math.isnan(level)]
        if not known:
            return self.levels
        first = known[0]
        other = min(first + SPAN, known[-1])
        start = self.levels[first]
        slope = (start - self.levels[other]) / max(other - first, 1)
        guess = [start + slope * (first - index) for index in range(first)]
        return guess + self.levels[first:]

    def _forget(self) -> None:
        self._entered: list[torch.Tensor | float] = [0.0] * len(self)
        self._left: list[list[torch.Tensor]] = [[] for _ in self]

    def get_extra_state(self) -> dict[str, Any]:
        """Return what `state_dict` saves beside the parameters."""
        return {"exponents": list(self.exponents), "levels": list(self.levels)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore it."""
        self.exponents = list(state["exponents"])
        self.levels = list(state["levels"])


# -- a network that needs it ----------------------------------------------------------

DEPTH = 12  # blocks
WIDTH = 24
GAIN = 8.0  # by which each block multiplies the gradient


class Steeper(torch.autograd.Function):
    """Keep the value, multiply the gradient by `GAIN`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        """Keep the value."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        """Multiply the gradient."""
        return grad * GAIN


class Block(nn.Module):
    """Two layers beside a residual, and a steep way back."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the block."""
        out = x + 0.3 * self.second(torch.tanh(self.first(x)))
        return Steeper.apply(out)


def train(
    steps: int, *, half: bool = True, local: bool = False, **options: Any
) -> float:
    """Train until `steps` were applied, but for ten more at most; return the loss."""
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    y = torch.sin(x @ torch.randn(4, 8))
    first = nn.Linear(4, WIDTH)
    blocks = [Block() for _ in range(DEPTH)]
    kind = LocalScales if local else nn.Sequential
    model = kind(first, *blocks, nn.Linear(WIDTH, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, eps=1e-30)
    # That no single scale trains this network is what the example shows.
    scaler = GradScaler("cpu", enabled=half, on_stuck=lambda _: None, **options)
    applied: list[int] = []
    scaler.gate(lambda: applied.append(1))
    for _ in range(steps + 10):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=half):
            out = model(x)
        scaler.scale(nn.functional.mse_loss(out.float(), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        if isinstance(model, LocalScales):
            model.follow()
        if len(applied) == steps:
            break
    with torch.no_grad():
        return nn.functional.mse_loss(model(x), y).item()


def main() -> None:
    """Train in FP32, and in FP16 with and without local scales."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 80
    best = {"policy": "static", "init_scale": 2.0**-17}
    print(f"FP32:                           loss {train(steps, half=False):.4f}")
    print(f"FP16, the best static scale:    loss {train(steps, **best):.4f}")
    print(f"FP16, torch's rule:             loss {train(steps):.4f}")
    print(f"FP16, headroom:                 loss {train(steps, policy='headroom'):.4f}")
    print(f"FP16, with local scales:        loss {train(steps, local=True):.4f}")


if __name__ == "__main__":
    main()
