"""How large the gradients of each block are, and which power of two suits them.

All numbers stay on the device.  A level is log2 of the largest gradient in a block,
multiplied by the loss scale but not by the block's factor; it rises at once and sinks
slowly.  Blocks that no gradient has reached yet are guessed from those that one has.
"""

from typing import Any

import torch

from buoy._backends import torch as backend

__all__ = ["Levels"]

_TARGET = 11.0  # log2 of where the largest gradient is to lie; FP16 ends at 16
_SINK = 1.0 / 16.0  # binades per backward pass
_RETREAT = 4.0  # binades, when a block overflows
_STEEP = 16.0  # binades per block that a guess may assume
_NEAR = 4.0  # blocks that a guess looks at
_LIMIT = 96.0  # of an exponent


class Levels:
    """Levels and factors of a row of blocks, in the order of the forward pass."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._count = count
        # NaN where none is known.
        self._level = torch.full(
            (count,), torch.nan, dtype=torch.float32, device=device
        )
        self._then: torch.Tensor | None = None  # the scale of the backward pass
        self._set_exponents(torch.zeros_like(self._level))
        self._clear()

    def _clear(self) -> None:
        self._arrived: list[list[torch.Tensor]] = [[] for _ in range(self._count)]
        self._gone: list[list[torch.Tensor]] = [[] for _ in range(self._count)]
        self._outside: list[torch.Tensor] = []  # at the global scale

    def _set_exponents(self, exponents: torch.Tensor) -> None:
        self._exponents = exponents
        # Built from its bits: a device's power function need not be exact.
        bits = (exponents.to(torch.int32) + 127) << 23
        self.factors = bits.view(torch.float32)

    # -- during a backward pass -------------------------------------------------------

    def begin(self, scale: torch.Tensor | None) -> None:
        """Note the loss scale of this backward pass."""
        self._then = None if scale is None else scale.detach().clone()

    @torch.no_grad()
    def leaving(self, index: int, grad: torch.Tensor) -> None:
        """Measure a gradient that a block has computed."""
        values = grad._values() if grad.is_sparse else grad
        self._gone[index].append(backend.amax([values.detach()]))

    def passing(self, grad: torch.Tensor, origin: int, target: int) -> torch.Tensor:
        """Rescale a gradient from one block's factor to another's; -1 is outside."""
        factor = torch.ones((), dtype=torch.float32, device=self.factors.device)
        if target >= 0:
            factor = self.factors[target]
        if origin >= 0:
            factor = factor / self.factors[origin]
        size = backend.amax([grad.detach()]).to(factor.device)
        if origin >= 0:
            self._gone[origin].append(size)
        if target >= 0:
            self._arrived[target].append(size * factor)
        if origin < 0 or target < 0:
            self._outside.append(size if origin < 0 else size * factor)
        # In FP32: a factor may lie outside of FP16's range where the product does not.
        return (grad.float() * factor.to(grad.device)).to(grad.dtype)

    def outside(self) -> torch.Tensor | None:
        """Give the largest gradient between the blocks, where the scale alone counts.

        float32 [].
        """
        sizes = [size.to(self._level.device) for size in self._outside]
        return torch.stack(sizes).max() if sizes else None

    # -- between backward passes ------------------------------------------------------

    @torch.no_grad()
    def follow(self, scale: torch.Tensor | None) -> None:
        """Move the factors to where the gradients were."""
        arrived, gone = self._largest(self._arrived), self._largest(self._gone)
        self._clear()
        came = torch.isfinite(arrived) & (arrived > 0)
        burst = came & ~torch.isfinite(gone)
        size = torch.where(burst, arrived, torch.maximum(arrived, gone))
        seen = torch.where(came, torch.log2(size) - self._exponents, torch.nan)
        sunk = self._level - _SINK
        level = torch.where(came, torch.fmax(seen, sunk), self._level)
        raised = torch.fmax(seen, self._level) + _RETREAT
        level = torch.where(burst, raised, level)
        if scale is not None and self._then is not None:
            level = level + torch.log2(scale / self._then).to(level.device)
        self._level = level
        level = self._guessed(level)
        wanted = torch.floor(_TARGET - level).clamp(-_LIMIT, _LIMIT)
        self._set_exponents(torch.where(level.isnan(), self._exponents, wanted))

    def _largest(self, sizes: list[list[torch.Tensor]]) -> torch.Tensor:
        """Take the largest of each block's measurements; -1 where there is none."""
        home = self._level.device
        none = torch.full((), -1.0, dtype=torch.float32, device=home)
        rows = [
            torch.stack([one.to(home) for one in some]).max() if some else none
            for some in sizes
        ]
        return torch.stack(rows)

    def _guessed(self, level: torch.Tensor) -> torch.Tensor:
        """Continue the line through the known levels to the blocks never reached."""
        known = ~level.isnan()
        index = torch.arange(self._count, device=level.device, dtype=level.dtype)
        first = torch.where(known, index, torch.inf).min()
        near = known & (index <= first + _NEAR)
        last = torch.where(near, index, -torch.inf).max()
        low = torch.where(index == first, level, 0.0).nansum()
        high = torch.where(index == last, level, 0.0).nansum()
        slope = (low - high) / (last - first).clamp(min=1.0)
        slope = slope.clamp(-_STEEP, _STEEP)
        guess = low + slope * (first - index)
        # Nothing known at all: the distances are infinite, the guess is no number.
        guess = torch.where(torch.isfinite(guess), guess, torch.nan)
        return torch.where(known, level, guess)

    # -- state ------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Write levels (None: not known) and exponents."""
        levels = backend.read(list(self._level))
        exponents = backend.read(list(self._exponents))
        kept = [None if x != x else x for x in levels]  # noqa: PLR0124 - NaN
        return {"levels": kept, "exponents": exponents}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Read them back."""
        device = self._level.device
        levels = [float("nan") if x is None else x for x in state["levels"]]
        self._level = torch.tensor(levels, dtype=torch.float32, device=device)
        exponents = state["exponents"]
        self._set_exponents(torch.tensor(exponents, dtype=torch.float32, device=device))
        self._then = None
        self._clear()
