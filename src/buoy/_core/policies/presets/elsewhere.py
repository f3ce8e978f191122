"""Scalers of Keras, TensorFlow, Paddle, MindSpore, MXNet, Chainer, NNabla."""

from dataclasses import replace

from buoy._core.policies.lognormal import LogNormal
from buoy._core.policies.policy import Policy
from buoy._core.policies.presets.peer import PeerBackoff
from buoy._core.policies.presets.quirks import Quirks
from buoy._core.policies.presets.table import FLOAT32_MAX, preset, refuse
from buoy._core.policies.static import Static


@preset("Keras LossScaleOptimizer 3.15")
def keras(
    initial_scale: float = 2.0**15,
    dynamic_growth_steps: int = 2000,
    api: str = "apply",
) -> Policy:
    """Double after 2000 clean steps, halve on overflow; no bounds.

    Bug of the peer: 0 and inf are reached, and stay.  `api="stateless_apply"` is its
    path under JAX, where subnormal scales become 0.
    """
    return PeerBackoff(
        init_scale=initial_scale,
        growth_interval=dynamic_growth_steps,
        quirks=Quirks(
            at_min="none",
            at_max="none",
            flush_subnormals=api == "stateless_apply",
        ),
    )


@preset("tf.keras LossScaleOptimizer 2.15")
def tf_keras(
    dynamic: bool = True,
    initial_scale: float = 2.0**15,
    dynamic_growth_steps: int = 2000,
    inner: str = "new",
) -> Policy:
    """Double after 2000 clean steps, halve on overflow down to 1.

    Bug of the peer: `dynamic=False` applies overflows.  `inner` names the generation
    of the wrapped optimizer; the rule is the same.
    """
    del inner
    if not dynamic:
        return Static(init_scale=initial_scale)
    return tf(initial_scale, dynamic_growth_steps)


@preset("tf.compat.v1 DynamicLossScale 2.15")
def tf(
    initial_loss_scale: float = 2.0**15,
    increment_period: int = 2000,
    multiplier: float = 2.0,
) -> Policy:
    """Grow after 2000 clean steps, divide on overflow down to 1."""
    return PeerBackoff(
        init_scale=initial_loss_scale,
        growth_factor=multiplier,
        backoff_factor=1.0 / multiplier,
        growth_interval=increment_period,
        min_scale=1.0,
        max_scale=FLOAT32_MAX,
        quirks=Quirks(at_max="keep"),
    )


@preset("tf.contrib ExponentialUpdateLossScaleManager 1.15")
def tf1_contrib(
    init_loss_scale: float = 2.0**15,
    incr_every_n_steps: int = 2000,
    decr_every_n_nan_or_inf: int = 2,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.8,
) -> Policy:
    """Shrink at every second overflow, counted until the scale moves."""
    return PeerBackoff(
        init_scale=init_loss_scale,
        growth_factor=incr_ratio,
        backoff_factor=decr_ratio,
        growth_interval=incr_every_n_steps,
        min_scale=1.0,
        max_scale=FLOAT32_MAX,
        hysteresis=decr_every_n_nan_or_inf,
        hysteresis_refill="change",
        quirks=Quirks(at_max="keep"),
    )


@preset("paddle.amp.GradScaler 3.3.1")
def paddle(
    init_loss_scaling: float = 2.0**16,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.5,
    incr_every_n_steps: int = 2000,
    decr_every_n_nan_or_inf: int = 1,
) -> PeerBackoff:
    """Shrink at every n-th overflow in a row; no bounds.

    Bug of the peer: 0 and inf are reached, and stay.
    """
    return PeerBackoff(
        init_scale=init_loss_scaling,
        growth_factor=incr_ratio,
        backoff_factor=decr_ratio,
        growth_interval=incr_every_n_steps,
        hysteresis=decr_every_n_nan_or_inf,
        hysteresis_refill="clean_or_change",
        quirks=Quirks(at_min="none", at_max="none"),
    )


@preset("Paddle static op update_loss_scaling 3.3.1")
def paddle_op(
    init_loss_scaling: float = 2.0**15,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.8,
    incr_every_n_steps: int = 1000,
    decr_every_n_nan_or_inf: int = 2,
) -> Policy:
    """Follow Paddle's rule between 1 and the float32 maximum."""
    rule = paddle(
        init_loss_scaling,
        incr_ratio,
        decr_ratio,
        incr_every_n_steps,
        decr_every_n_nan_or_inf,
    )
    return replace(
        rule, min_scale=1.0, max_scale=FLOAT32_MAX, quirks=Quirks(at_max="keep")
    )


@preset("MindSpore DynamicLossScaleManager 2.10")
def mindspore(
    init_loss_scale: float = 2.0**24,
    scale_factor: float = 2.0,
    scale_window: int = 2000,
) -> Policy:
    """Grow after 2000 clean steps, divide down to 1; stop at 1001 overflows."""
    if init_loss_scale < 1.0:
        raise refuse("mindspore", "init_loss_scale", init_loss_scale, "at least 1")
    return PeerBackoff(
        init_scale=init_loss_scale,
        growth_factor=scale_factor,
        backoff_factor=1.0 / scale_factor,
        growth_interval=scale_window,
        min_scale=1.0,
        max_scale=FLOAT32_MAX,
        quirks=Quirks(
            arithmetic="double",
            backoff_divisor=scale_factor,
            at_max="none",
            stop_after=1000,
        ),
    )


@preset("MindSpore nn.DynamicLossScaleUpdateCell 2.10")
def mindspore_cell(
    loss_scale_value: float = 2.0**16,
    scale_factor: float = 2.0,
    scale_window: int = 2000,
) -> Policy:
    """Grow after 2000 clean steps, divide on overflow down to 1; no ceiling."""
    return PeerBackoff(
        init_scale=loss_scale_value,
        growth_factor=scale_factor,
        backoff_factor=1.0 / scale_factor,
        growth_interval=scale_window,
        min_scale=1.0,
        max_scale=FLOAT32_MAX,
        quirks=Quirks(at_max="none"),
    )


@preset("mxnet.amp LossScaler 1.9.1")
def mxnet(
    init_scale: float = 2.0**16,
    scale_seq_len: int = 2000,
    max_loss_scale: float = 2.0**24,
) -> Policy:
    """Double after 2000 clean steps up to 2^24, halve on overflow; no floor.

    Bug of the peer: every change takes effect one step late, so that each overflow is
    followed by another step at the same scale.
    """
    return PeerBackoff(
        init_scale=init_scale,
        growth_interval=scale_seq_len,
        max_scale=max_loss_scale,
        quirks=Quirks(
            arithmetic="double", at_min="none", lag=True, stop_unscalable=True
        ),
    )


@preset("chainer Optimizer.loss_scaling 7.8.1")
def chainer(interval: int = 1000, scale: float | None = None) -> Policy:
    """Double each step until the first overflow, then grow twofold in 1000 steps.

    A fixed `scale` stays.
    """
    if scale is not None:
        return Static(init_scale=scale)
    return PeerBackoff(
        init_scale=1.0,
        growth_factor=2.0 ** (1.0 / interval),
        growth_interval=1,
        min_scale=1.0,
        max_scale=65504.0,
        quirks=Quirks(arithmetic="double", warm_growth_factor=2.0),
    )


@preset("NNabla DynamicLossScalingUpdater 1.39")
def nnabla(
    scale: float = 8.0,
    scaling_factor: float = 2.0,
    N: int = 2000,  # noqa: N803 - the peer's own name
) -> Policy:
    """Grow after 2002 clean steps, then every 2001; divide on overflow; no bounds.

    The peer tries again at once with new data, up to 100 times: each attempt is one
    `update` here.
    """
    return PeerBackoff(
        init_scale=scale,
        growth_factor=scaling_factor,
        backoff_factor=1.0 / scaling_factor,
        growth_interval=N + 1,
        quirks=Quirks(
            arithmetic="double",
            backoff_divisor=scaling_factor,
            at_min="none",
            at_max="none",
            growth_delay=1,
        ),
    )


@preset("OpenSeq2Seq BackoffScaler")
def openseq2seq(
    scale_min: float = 1.0,
    scale_max: float = 2.0**14,
    step_factor: float = 2.0,
    step_window: int = 2000,
    algorithm: str = "Backoff",
    ordering: str = "increment_after_update",
) -> Policy:
    """Grow after 2000 clean steps, divide on overflow, within bounds; start at the top.

    Bug of the peer: as shipped it races with its own step counter; this is the order
    that was meant.
    """
    del algorithm, ordering
    return PeerBackoff(
        init_scale=scale_max,
        growth_factor=step_factor,
        backoff_factor=1.0 / step_factor,
        growth_interval=step_window,
        min_scale=scale_min,
        max_scale=scale_max,
        quirks=Quirks(clamp_always=True),
    )


@preset("OpenSeq2Seq LogMaxScaler")
def openseq2seq_logmax(
    scale_min: float = 1.0,
    scale_max: float = 2.0**14,
    log_max: float = 16.0,
    beta1: float = 0.99,
    beta2: float = 0.999,
    overflow_std_dev: float = 3.09,
    algorithm: str = "LogMax",
) -> Policy:
    """Place the scale by the mean and spread of log2 of the largest gradient.

    Bugs of the peer: an overflow enters 2^log_max as if it were a logarithm, and pins
    the scale at its floor for thousands of steps; a zero gradient makes everything NaN.
    """
    del algorithm
    return LogNormal(
        init_scale=max(1.0, scale_min),
        min_scale=scale_min,
        max_scale=scale_max,
        overflow_log2=2.0**log_max,
        mean_decay=beta1,
        variance_decay=beta2,
        deviations=overflow_std_dev,
        skip_zero=False,
    )
