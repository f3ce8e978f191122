"""Round FP32 to FP16 or BF16: to the nearest, or up and down by chance.

An update smaller than half a unit in the last place is lost by rounding to the nearest,
every time.  Rounded by chance it moves the weight now and then, and on average by just
the update.  Neither makes an inf of a finite number: what is out of range saturates.
"""

from typing import Literal

import torch

from buoy._backends import torch as backend

__all__ = ["HALVES", "Rounding", "nearest", "stochastic", "write"]

HALVES = frozenset({torch.float16, torch.bfloat16})
Rounding = Literal["nearest", "stochastic"]
Generators = dict[torch.device, torch.Generator]


def nearest(wide: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to the nearest, ties to even.

    Example:
        >>> nearest(torch.tensor([1.0001, 1e6]), torch.float16)
        tensor([1.0000e+00, 6.5504e+04], dtype=torch.float16)
    """
    limit = torch.finfo(dtype).max
    return wide.to(dtype).clamp_(-limit, limit)


def stochastic(
    wide: torch.Tensor, dtype: torch.dtype, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Round up or down with the odds that make the result right on average.

    What the format holds exactly stays as it is.

    Example:
        >>> chance = torch.Generator().manual_seed(0)
        >>> wide = torch.full((4000,), 1.0001)
        >>> stochastic(wide, torch.float16, chance).float().mean()
        tensor(1.0001)
    """
    rounded = _of_bf16 if dtype is torch.bfloat16 else _of_fp16
    limit = torch.finfo(dtype).max
    result = rounded(wide, generator).clamp_(-limit, limit)
    return torch.where(torch.isfinite(wide), result, wide).to(dtype)


def _of_bf16(wide: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """Add chance to the 16 bits that BF16 lacks, and cut them off."""
    bits = wide.view(torch.int32)
    chance = torch.randint(
        0,
        1 << 16,
        bits.shape,
        generator=generator,
        device=wide.device,
        dtype=bits.dtype,
    )
    return ((bits + chance) & -(1 << 16)).view(torch.float32)


def _of_fp16(wide: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """Count in steps between neighbours: of the binade, or of the subnormals.

    Exact in float32: there are fewer than 2^11 whole steps.
    """
    _, exponent = torch.frexp(wide)
    exponent = exponent.clamp_(min=-13) - 11
    steps = torch.ldexp(wide, -exponent)
    below = steps.floor()
    chance = torch.rand(
        wide.shape, generator=generator, dtype=torch.float32, device=wide.device
    )
    return torch.ldexp(below + (chance < steps - below), exponent)


def write(
    params: list[torch.Tensor],
    wide: list[torch.Tensor],
    rounding: Rounding,
    generators: Generators,
) -> None:
    """Round each into its parameter, in place."""
    if not params:
        return
    params = [backend.local(param.detach()) for param in params]
    wide = [backend.local(master.detach()) for master in wide]
    if rounding == "stochastic":
        for param, master in zip(params, wide, strict=True):
            chance = generators.get(param.device)
            param.copy_(stochastic(master, param.dtype, chance))
        return
    torch._foreach_copy_(params, wide)
    for dtype in HALVES:
        some = [param for param in params if param.dtype is dtype]
        if some:
            limit = torch.finfo(dtype).max
            torch._foreach_clamp_max_(some, limit)
            torch._foreach_clamp_min_(some, -limit)
