"""The size of each block's gradients, and the power of two that scales it.

All numbers stay on the device.  A level is log2 of the largest gradient in a block,
with the loss scale but without the block's factor; it rises at once and falls slowly.
The levels of blocks that no gradient has reached yet are extrapolated.  Levels and
exponents are in bits: 1 is a factor of two.
"""

from typing import Any

import torch

from buoy._backends import torch as backend

__all__ = ["OUTSIDE", "Levels"]

OUTSIDE = -1  # of all blocks: the factor is 1

_TARGET = 11.0  # log2 of the largest scaled gradient; FP16 overflows at 16
_SINK = 1.0 / 16.0  # bits per backward pass
_RETREAT = 4.0  # bits, when a block overflows
_STEEP = 16.0  # bits per block: the limit of the extrapolated slope
_NEAR = 4.0  # blocks that the extrapolation uses
_LIMIT = 96.0  # of an exponent


class Levels:
    """Levels and factors of a sequence of blocks, in the order of the forward pass."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._count, self._device = count, device
        self._restart([torch.nan] * count, [0.0] * count)

    def _restart(self, levels: list[float], exponents: list[float]) -> None:
        """Continue from these; an unknown level is NaN."""
        both = [levels, exponents]
        made = torch.tensor(both, dtype=torch.float32, device=self._device)
        self._level = made[0]
        self._set_exponents(made[1])
        self._then: torch.Tensor | None = None  # the loss scale of the backward pass
        self._clear()

    def _clear(self) -> None:
        self._entered: list[list[torch.Tensor]] = [[] for _ in range(self._count)]
        self._left: list[list[torch.Tensor]] = [[] for _ in range(self._count)]
        self._outside: list[torch.Tensor] = []  # at the global scale

    def _set_exponents(self, exponents: torch.Tensor) -> None:
        self._exponents = exponents
        # Built from its bits: `exp2` on a device may not be exact.
        bits = (exponents.to(torch.int32) + 127) << 23
        self.factors = bits.view(torch.float32)

    # -- during a backward pass -------------------------------------------------------

    def begin(self, scale: torch.Tensor | None) -> None:
        """Store the loss scale of this backward pass."""
        self._then = None if scale is None else scale.detach().clone()

    @torch.no_grad()
    def measure(self, index: int, grad: torch.Tensor) -> None:
        """Measure a gradient that a block has computed."""
        values = grad._values() if grad.is_sparse else grad
        self._left[index].append(backend.amax([values.detach()]).to(self._device))

    def rescale(self, grad: torch.Tensor, origin: int, target: int) -> torch.Tensor:
        """Rescale a gradient from one block's factor to another's, and measure it."""
        factor = torch.ones((), dtype=torch.float32, device=self._device)
        if target != OUTSIDE:
            factor = self.factors[target]
        if origin != OUTSIDE:
            factor = factor / self.factors[origin]
        before = backend.amax([grad.detach()]).to(self._device)
        after = before * factor
        if origin != OUTSIDE:
            self._left[origin].append(before)
        if target != OUTSIDE:
            self._entered[target].append(after)
        if OUTSIDE in (origin, target):
            self._outside.append(before if origin == OUTSIDE else after)
        # In FP32: a factor may exceed FP16's range even if the product does not.
        return (grad.float() * factor.to(grad.device)).to(grad.dtype)

    def outside(self) -> torch.Tensor | None:
        """Return the largest gradient between blocks, which has only the loss scale.

        float32 [].
        """
        return torch.stack(self._outside).max() if self._outside else None

    # -- between backward passes ------------------------------------------------------

    @torch.no_grad()
    def follow(self, scale: torch.Tensor | None) -> None:
        """Update the factors from the measured gradients."""
        entered, left = self._largest(self._entered), self._largest(self._left)
        self._clear()
        reached = torch.isfinite(entered) & (entered > 0)
        overflowed = reached & ~torch.isfinite(left)
        size = torch.where(overflowed, entered, torch.maximum(entered, left))
        seen = torch.where(reached, torch.log2(size) - self._exponents, torch.nan)
        level = torch.where(reached, torch.fmax(seen, self._level - _SINK), self._level)
        raised = torch.fmax(seen, self._level) + _RETREAT
        level = torch.where(overflowed, raised, level)
        if scale is not None and self._then is not None:
            level = level + torch.log2(scale / self._then).to(level.device)
        self._level = level
        level = self._guessed(level)
        wanted = torch.floor(_TARGET - level).clamp(-_LIMIT, _LIMIT)
        self._set_exponents(torch.where(level.isnan(), self._exponents, wanted))

    def _largest(self, sizes: list[list[torch.Tensor]]) -> torch.Tensor:
        """Return the largest measurement of each block; -1 if there is none."""
        none = torch.full((), -1.0, dtype=torch.float32, device=self._device)
        return torch.stack([torch.stack([none, *some]).max() for some in sizes])

    def _guessed(self, level: torch.Tensor) -> torch.Tensor:
        """Extrapolate the known levels linearly to the blocks never reached."""
        known = ~level.isnan()
        index = torch.arange(self._count, device=level.device, dtype=level.dtype)
        first = torch.where(known, index, torch.inf).min()
        near = known & (index <= first + _NEAR)
        last = torch.where(near, index, -torch.inf).max()
        low = torch.where(index == first, level, 0.0).nansum()
        high = torch.where(index == last, level, 0.0).nansum()
        slope = ((low - high) / (last - first).clamp(min=1.0)).clamp(-_STEEP, _STEEP)
        guess = low + slope * (first - index)
        # If no level is known, distances are infinite and the result is not finite.
        guess = torch.where(torch.isfinite(guess), guess, torch.nan)
        return torch.where(known, level, guess)

    # -- state ------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return levels (None: unknown) and exponents."""
        levels = backend.read(list(self._level))
        exponents = backend.read(list(self._exponents))
        kept = [None if x != x else x for x in levels]  # noqa: PLR0124 - NaN
        return {"levels": kept, "exponents": exponents}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore levels and exponents."""
        levels = [torch.nan if x is None else x for x in state["levels"]]
        self._restart(levels, state["exponents"])
