"""Scalers of the JAX world, and those that follow its shape."""

from buoy._core.policies.policy import Policy
from buoy._core.policies.presets.peer import PeerBackoff
from buoy._core.policies.presets.quirks import Quirks
from buoy._core.policies.presets.table import FLOAT32_MAX, FLOAT32_TINY, preset, refuse


@preset("flax DynamicScale 0.12.8")
def flax(
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    scale: float = 65536.0,
    minimum_scale: float | None = FLOAT32_TINY,
) -> Policy:
    """Grow after 2001 clean steps, halve on overflow.

    Bug of the peer: the counter is tested before it is moved, so growth comes one step
    late, every time.
    """
    return PeerBackoff(
        init_scale=scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval + 1,
        min_scale=minimum_scale or FLOAT32_TINY,
        max_scale=FLOAT32_MAX,
        quirks=Quirks(
            at_min="clamp" if minimum_scale else "none", flush_subnormals=True
        ),
    )


@preset("jmp DynamicLossScale 0.0.4")
def jmp(
    loss_scale: float = 2.0**15,
    period: int = 2000,
    factor: float = 2.0,
    min_loss_scale: float | None = 1.0,
    jit: bool = True,
) -> Policy:
    """Grow after 2000 clean steps, divide on overflow, never below the floor.

    Bug of the peer: any pass through `jit` resets `min_loss_scale` to 1; `jit=False`
    is the rule outside of it.
    """
    floor = 1.0 if min_loss_scale is None else min_loss_scale
    outside = _jmp_rule(loss_scale, period, factor, floor)
    return _jmp_rule(loss_scale, period, factor, 1.0, divides=False) if jit else outside


@preset("axon LossScale (Elixir)")
def axon(
    init_scale: float = 2.0**15,
    period: int = 2000,
    factor: float = 2.0,
    min_loss_scale: float = 1.0,
) -> Policy:
    """Follow jmp's rule.

    Bug of the peer: NaN is taken for finite; that is its survey's, not its rule's.
    """
    return _jmp_rule(init_scale, period, factor, min_loss_scale)


@preset("mpx DynamicLossScaling 0.1.8")
def mpx(
    loss_scaling: float = 2.0**15,
    min_loss_scaling: float = 1.0,
    period: int = 2000,
    factor: float = 2.0,
) -> Policy:
    """Follow jmp's rule between the floor and 65504.

    Bug of the peer: after touching 65504 the scale is no power of two any more.
    """
    return PeerBackoff(
        init_scale=loss_scaling,
        growth_factor=factor,
        backoff_factor=1.0 / factor,
        growth_interval=period,
        min_scale=min_loss_scaling,
        max_scale=65504.0,
        quirks=Quirks(clamp_always=True),
    )


@preset("jaxamp DynamicScalerState 0.0.4")
def jaxamp(
    patience: int = 2000,
    adjust_factor: float = 2.0,
    scaler: float = 2.0**15,
) -> Policy:
    """Grow after 2001 clean steps, divide on overflow; no bounds.

    Bugs of the peer: growth is one step late; inf and 0 are final.
    """
    return PeerBackoff(
        init_scale=scaler,
        growth_factor=adjust_factor,
        backoff_factor=1.0 / adjust_factor,
        growth_interval=patience + 1,
        quirks=Quirks(
            backoff_divisor=adjust_factor,
            at_min="none",
            at_max="none",
            flush_subnormals=True,
        ),
    )


@preset("MindSpore amp.DynamicLossScaler 2.10")
def mindspore_amp(
    scale_value: float = 2.0**16,
    scale_factor: float = 2.0,
    scale_window: int = 2000,
) -> Policy:
    """Follow jmp's rule with a floor of 1."""
    if scale_value < 1.0:
        raise refuse("mindspore_amp", "scale_value", scale_value, "at least 1")
    return _jmp_rule(scale_value, scale_window, scale_factor, 1.0)


def _jmp_rule(
    init: float, period: int, factor: float, floor: float, *, divides: bool = True
) -> Policy:
    # XLA turns a division by a constant into a multiplication by its reciprocal.
    return PeerBackoff(
        init_scale=init,
        growth_factor=factor,
        backoff_factor=1.0 / factor,
        growth_interval=period,
        min_scale=floor,
        max_scale=FLOAT32_MAX,
        quirks=Quirks(backoff_divisor=factor if divides else None, at_max="keep"),
    )
