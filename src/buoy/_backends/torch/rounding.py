"""Round FP32 to FP16 or BF16: to the nearest value, or stochastically.

Rounding to the nearest loses every update that is smaller than half a unit in the last
place.  Stochastic rounding is unbiased: on average the weight moves by the update.
Both saturate: a finite number never becomes inf.
"""

from typing import Literal

import torch

from buoy._backends import torch as backend

__all__ = ["HALVES", "Rounding", "nearest", "stochastic", "write"]

HALVES = frozenset({torch.float16, torch.bfloat16})
Rounding = Literal["nearest", "stochastic"]


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
    """Round up or down at random, so that the expected value is exact.

    Values that the format represents exactly do not change.

    Example:
        >>> chance = torch.Generator().manual_seed(0)
        >>> wide = torch.full((4000,), 1.0001)
        >>> stochastic(wide, torch.float16, chance).float().mean()
        tensor(1.0001)
    """
    rounded = _to_bf16 if dtype is torch.bfloat16 else _to_fp16
    limit = torch.finfo(dtype).max
    result = rounded(wide, generator).clamp_(-limit, limit)
    return torch.where(torch.isfinite(wide), result, wide).to(dtype)


def _to_bf16(wide: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """Add random numbers to the 16 bits that BF16 lacks, and truncate."""
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


def _to_fp16(wide: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """Round in units in the last place, of normal or subnormal numbers.

    Exact in float32: there are fewer than 2^11 units.
    """
    _, exponent = torch.frexp(wide)
    exponent = exponent.clamp_(min=-13) - 11
    units = torch.ldexp(wide, -exponent)
    below = units.floor()
    chance = torch.rand(
        wide.shape, generator=generator, dtype=torch.float32, device=wide.device
    )
    return torch.ldexp(below + (chance < units - below), exponent)


def write(
    pairs: list[tuple[torch.Tensor, torch.Tensor]], rounding: Rounding | None, seed: int
) -> None:
    """Round FP32 tensors into parameters, in place; by default to the nearest.

    Each pair is a parameter and its FP32 tensor.
    """
    params = [backend.local(param.detach()) for param, _ in pairs]
    wide = [backend.local(master.detach()) for _, master in pairs]
    if rounding == "stochastic":
        devices = {param.device for param in params}
        chance = {one: torch.Generator(one).manual_seed(seed) for one in devices}
        for param, master in zip(params, wide, strict=True):
            param.copy_(stochastic(master, param.dtype, chance[param.device]))
        return
    if params:
        torch._foreach_copy_(params, wide)
    for dtype in HALVES:
        if some := [param for param in params if param.dtype is dtype]:
            limit = torch.finfo(dtype).max
            torch._foreach_clamp_max_(some, limit)
            torch._foreach_clamp_min_(some, -limit)
