"""Scalers of the PyTorch world."""

from math import inf

from buoy._core.checks import whole
from buoy._core.policies.backoff import check_factors
from buoy._core.policies.policy import Policy
from buoy._core.policies.presets.peer import PeerBackoff
from buoy._core.policies.presets.quirks import Quirks
from buoy._core.policies.presets.table import FLOAT32_MAX, FLOAT32_TINY, preset, refuse
from buoy._core.policies.static import NoScaling, Static
from buoy._core.policies.torch_rule import TorchRule


@preset("torch.amp.GradScaler 2.13")
def torch(
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
) -> TorchRule:
    """Grow after 2000 clean steps, halve on overflow; no floor.

    Bug of the peer: without a floor the scale reaches 0, and 1/0 then writes NaN into
    the weights.  `backoff` has the same trajectory and bounds.
    """
    policy = TorchRule(
        init_scale=init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
    )
    check_factors(policy)
    whole(policy, "growth_interval", least=1)
    return policy


@preset("torch.distributed.fsdp.sharded_grad_scaler 2.13, on a CPU")
def fsdp(
    init_scale: float = 2.0**16,
    backoff_factor: float = 0.5,
    growth_factor: float = 2.0,
    growth_interval: int = 2000,
) -> Policy:
    """Follow torch's rule in float32, with neither floor nor ceiling.

    Bug of the peer: on a CPU the scale grows to inf and stays there.
    """
    return PeerBackoff(
        init_scale=init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        max_scale=FLOAT32_MAX,
        quirks=Quirks(at_min="none", at_max="none"),
    )


@preset("fairscale.optim.grad_scaler.ShardedGradScaler 0.4.13, on a CPU")
def fairscale_sharded(
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
) -> Policy:
    """Follow torch's rule in float32, with neither floor nor ceiling.

    Bug of the peer: the scale grows to inf and stays there.
    """
    return fsdp(init_scale, backoff_factor, growth_factor, growth_interval)


@preset("apex.amp LossScaler, last version")
def apex(
    loss_scale: float | str = "dynamic",
    init_scale: float = 2.0**16,
    scale_factor: float = 2.0,
    scale_window: int = 2000,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> Policy:
    """Double after 2000 clean steps up to 2^24, halve on overflow.

    Bugs of the peer: `scale_factor` is ignored, the factor is always 2; a fixed
    `loss_scale` is never checked, so infinities are applied.
    """
    del scale_factor
    if loss_scale != "dynamic":
        return Static(init_scale=loss_scale)  # type: ignore[arg-type]
    return PeerBackoff(
        init_scale=min(init_scale, max_loss_scale),
        growth_interval=scale_window,
        min_scale=min_loss_scale or FLOAT32_TINY,
        max_scale=max_loss_scale,
        quirks=Quirks(
            arithmetic="double", at_min="clamp" if min_loss_scale else "none"
        ),
    )


@preset("apex.fp16_utils DynamicLossScaler")
def apex_fp16_utils(
    init_scale: float = 2.0**32,
    scale_factor: float = 2.0,
    scale_window: int = 1000,
) -> Policy:
    """Grow after 1000 clean steps, without ceiling; never below 1."""
    return PeerBackoff(
        init_scale=init_scale,
        growth_factor=scale_factor,
        backoff_factor=1.0 / scale_factor,
        growth_interval=scale_window,
        min_scale=1.0,
        quirks=Quirks(arithmetic="double", backoff_divisor=scale_factor, at_max="none"),
    )


@preset("mmcv.runner LossScaler 1.3.9")
def mmcv(
    init_scale: float = 2.0**32,
    mode: str = "dynamic",
    scale_factor: float = 2.0,
    scale_window: int = 1000,
) -> Policy:
    """Follow apex.fp16_utils; `mode="static"` keeps `init_scale`."""
    if mode == "static":
        return Static(init_scale=init_scale)
    return apex_fp16_utils(init_scale, scale_factor, scale_window)


@preset("NeMo GradScaler (nlp_overrides)")
def nemo(
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    hysteresis: int = 1,
) -> Policy:
    """Follow torch's rule, but forgive overflows until `hysteresis` come in a row."""
    return PeerBackoff(
        init_scale=init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        max_scale=FLOAT32_MAX,
        hysteresis=hysteresis,
        hysteresis_refill="clean",
        quirks=Quirks(arithmetic="wide", at_min="none", at_max="keep"),
    )


@preset("megatron-core DynamicGradScaler 0.16.1")
def megatron(
    initial_scale: float = 2.0**32,
    min_scale: float = 1.0,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 1000,
    hysteresis: int = 2,
) -> Policy:
    """Grow after 1000 clean steps; `hysteresis` overflows, in a row or not, shrink.

    Bugs of the peer: the budget refills on growth only, so that overflows far apart
    add up; there is no ceiling, and inf stays.
    """
    if initial_scale < min_scale:
        raise refuse("megatron", "initial_scale", initial_scale, "at least `min_scale`")
    return PeerBackoff(
        init_scale=initial_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        min_scale=min_scale,
        max_scale=FLOAT32_MAX,
        hysteresis=hysteresis,
        quirks=Quirks(at_max="none"),
    )


@preset("ColossalAI DynamicGradScaler 0.5.0")
def colossalai(
    initial_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 1000,
    min_scale: float | None = None,
    max_scale: float | None = None,
    hysteresis: int = 2,
) -> Policy:
    """Follow Megatron's rule, with an optional ceiling.

    Bug of the peer: its checkpoint omits both counters.
    """
    return PeerBackoff(
        init_scale=initial_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        min_scale=FLOAT32_TINY if min_scale is None else min_scale,
        max_scale=FLOAT32_MAX if max_scale is None else max_scale,
        hysteresis=max(hysteresis, 1),
        quirks=Quirks(
            at_min="clamp" if min_scale is not None else "none",
            at_max="clamp" if max_scale is not None else "none",
        ),
    )


@preset("DeepSpeed DynamicLossScaler and FP16 optimizers 0.19.8")
def deepspeed(
    init_scale: float = 2.0**16,
    scale_window: int = 1000,
    min_scale: float = 1.0,
    delayed_shift: int = 2,
    consecutive_hysteresis: bool = False,
    raise_error_at_min_scale: bool = True,
    optimizer: str = "ZeRO",
    enabled: bool = True,
    loss_scale: float = 0.0,
    initial_scale_power: float | None = None,
    loss_scale_window: int | None = None,
    hysteresis: int | None = None,
    min_loss_scale: float | None = None,
    zero_stage: int = 1,
    gradient_clipping: float = 0.0,
) -> Policy:
    """Double after 1001 clean steps, then every 1000; stop the run at the floor.

    Takes the scaler's arguments, or those of the `fp16` section of a configuration,
    from `enabled` on.  `optimizer="FP16_Optimizer"`, or stage 0, is the copy of the
    rule that ignores hysteresis and never stops.

    Bugs of the peer: growth is one step late; on each growth step the optimizer gets
    halved gradients, since it unscales with the scale just doubled.
    """
    del gradient_clipping
    if not enabled:
        return NoScaling()
    if loss_scale:
        return Static(init_scale=loss_scale)
    whole_rule = optimizer == "ZeRO" and zero_stage != 0
    shift = delayed_shift if hysteresis is None else hysteresis
    start = init_scale if initial_scale_power is None else 2.0**initial_scale_power
    return PeerBackoff(
        init_scale=start,
        growth_interval=loss_scale_window or scale_window,
        min_scale=float(min_loss_scale or min_scale),
        max_scale=FLOAT32_MAX,
        hysteresis=shift if whole_rule else 1,
        hysteresis_refill="clean" if consecutive_hysteresis else "growth",
        quirks=Quirks(
            arithmetic="double",
            at_max="none",
            growth_delay=1,
            stop_at_floor=raise_error_at_min_scale and whole_rule,
        ),
    )


@preset("MS-AMP FP8Optimizer")
def msamp(
    cur_scale: float = 2.0**16,
    scale_window: int = 1000,
    min_loss_scale: float = 1.0,
) -> Policy:
    """Follow DeepSpeed's stage 0: double after 1001 clean steps, no hysteresis."""
    return deepspeed(
        cur_scale, scale_window, min_loss_scale, optimizer="FP16_Optimizer"
    )


@preset("BMTrain OptimManager 1.0.1")
def bmtrain(
    loss_scale: float | None = 2.0**20,
    loss_scale_factor: float = 2.0,
    loss_scale_steps: int = 1024,
    min_loss_scale: float = 1.0,
    max_loss_scale: float | None = None,
) -> Policy:
    """Double after 1024 clean steps, halve on overflow; None switches it off.

    Bug of the peer: bounds stop the next move, not this one, so that the scale may
    pass each by up to one factor.
    """
    if loss_scale is None:
        return NoScaling()
    if max_loss_scale == inf:
        max_loss_scale = None
    factor = loss_scale_factor if loss_scale_factor > 1 else 1.0 / loss_scale_factor
    return PeerBackoff(
        init_scale=loss_scale,
        growth_factor=factor,
        backoff_factor=1.0 / factor,
        growth_interval=loss_scale_steps,
        min_scale=min_loss_scale,
        max_scale=FLOAT32_MAX if max_loss_scale is None else max_loss_scale,
        quirks=Quirks(
            arithmetic="double",
            backoff_divisor=factor,
            at_min="gate",
            at_max="none" if max_loss_scale is None else "gate",
        ),
    )


@preset("Cerebras GradScaler 2.10, float16")
def cerebras(
    loss_scale: float | str = "dynamic",
    init_scale: float = 2.0**15,
    steps_per_increase: int = 2000,
    min_loss_scale: float = 2.0**-14,
    max_loss_scale: float = 2.0**15,
    overflow_tolerance: float = 0.0,
) -> Policy:
    """Double after 2001 steps; halve when the share of overflows passes a tolerance.

    Bugs of the peer: growth is one step late; tolerated overflows count as clean.
    """
    if loss_scale != "dynamic":
        return Static(init_scale=loss_scale)  # type: ignore[arg-type]
    if min_loss_scale < 2.0**-14:
        raise refuse("cerebras", "min_loss_scale", min_loss_scale, "at least 2^-14")
    return PeerBackoff(
        init_scale=init_scale,
        growth_interval=steps_per_increase + 1,
        min_scale=min_loss_scale,
        max_scale=max_loss_scale,
        tolerance=overflow_tolerance,
        quirks=Quirks(clamp_always=True, tolerated_counts=True),
    )


@preset("fastai NonNativeMixedPrecision 2.8.12")
def fastai(
    max_loss_scale: float = 2.0**24,
    div_factor: float = 2.0,
    scale_wait: int = 500,
) -> Policy:
    """Grow after 500 clean steps in all, in a row or not; no bounds.

    Bug of the peer: `max_loss_scale` is where it starts, not a ceiling.
    """
    return PeerBackoff(
        init_scale=max_loss_scale,
        growth_factor=div_factor,
        backoff_factor=1.0 / div_factor,
        growth_interval=scale_wait,
        quirks=Quirks(
            arithmetic="double",
            backoff_divisor=div_factor,
            at_min="none",
            at_max="none",
            keep_count=True,
        ),
    )


@preset("guided-diffusion MixedPrecisionTrainer")
def guided_diffusion(
    initial_lg_loss_scale: float = 20.0,
    fp16_scale_growth: float = 1e-3,
) -> Policy:
    """Add 0.001 to log2 of the scale on each clean step, take 1 on overflow.

    Bug of the peer: no bounds; a NaN in the forward pass sends it to 2^-16000.
    """
    return PeerBackoff(
        init_scale_power=initial_lg_loss_scale,
        growth_step=fp16_scale_growth,
        growth_interval=1,
        quirks=Quirks(arithmetic="double", at_min="none", at_max="none"),
    )
