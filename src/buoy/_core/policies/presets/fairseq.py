"""The fairseq family: growth by distance from the last overflow, tolerance by share."""

from typing import Any

from buoy._core.policies.policy import Policy
from buoy._core.policies.presets.peer import PeerBackoff
from buoy._core.policies.presets.quirks import Quirks
from buoy._core.policies.presets.table import FLOAT32_MAX, FLOAT32_TINY, preset


def _family(
    init_scale: float,
    scale_factor: float,
    scale_window: int,
    tolerance: float,
    **quirks: Any,
) -> Policy:
    return PeerBackoff(
        init_scale=init_scale,
        growth_factor=scale_factor,
        backoff_factor=1.0 / scale_factor,
        growth_interval=scale_window,
        min_scale=quirks.pop("min_scale", FLOAT32_TINY),
        max_scale=FLOAT32_MAX,
        tolerance=tolerance,
        quirks=Quirks(
            arithmetic="double",
            backoff_divisor=scale_factor,
            at_max="none",
            modulo=True,
            **quirks,
        ),
    )


@preset("fairseq DynamicLossScaler 0.12.2")
def fairseq(
    init_scale: float = 2.0**15,
    scale_factor: float = 2.0,
    scale_window: int = 2000,
    tolerance: float = 0.0,
    threshold: float | None = None,
    min_loss_scale: float = 1e-4,
) -> Policy:
    """Grow after 2000 clean steps; stop the run rather than reach `min_loss_scale`.

    `threshold` is the floor at which it goes on.
    """
    return _family(
        init_scale,
        scale_factor,
        scale_window,
        tolerance,
        at_min="none",
        threshold=threshold,
        stop_scale=min_loss_scale or None,
    )


@preset("fairscale.experimental DynamicLossScaler 0.4.13")
def fairscale(
    init_scale: float = 2.0**15,
    scale_factor: float = 2.0,
    scale_window: int = 2000,
    tolerance: float = 0.0,
    threshold: float | None = None,
    min_loss_scale: float = 1e-4,
    protocol: str = "update_every_iteration",
) -> Policy:
    """Follow fairseq's rule, driven as torch's scaler is.

    Bug of the peer: `update()` after an overflow, as torch's users call it, counts that
    step twice; with a window of 1 it undoes the back-off at once.
    `protocol="update_on_success"` leaves that call out.
    """
    return _family(
        init_scale,
        scale_factor,
        scale_window,
        tolerance,
        at_min="none",
        threshold=threshold,
        stop_scale=min_loss_scale or None,
        overflow_counts=protocol == "update_every_iteration",
    )


@preset("metaseq DynamicLossScaler")
def metaseq(
    init_scale: float = 4.0,
    scale_factor: float = 2.0,
    scale_window: int = 256,
    tolerance: float = 0.0,
    threshold: float | None = None,
    min_loss_scale: float = 2.0**-5,
) -> Policy:
    """Follow fairseq's rule with a window that grows and shrinks with the scale.

    Holds rather than fall below `min_loss_scale`; the window shrinks all the same.
    """
    return _family(
        init_scale,
        scale_factor,
        scale_window,
        tolerance,
        min_scale=min_loss_scale or FLOAT32_TINY,
        at_min="keep",
        threshold=threshold,
        interval_follows_scale=True,
    )


@preset("fairseq2 StandardFloat16LossScaler 0.8.1")
def fairseq2(
    init_scale: float = 2.0**16,
    scale_factor: float = 2.0,
    scale_window: int = 2000,
    min_scale: float = 1e-4,
) -> Policy:
    """Follow torch's rule with a floor.

    Bug of the peer: changes of less than 1e-5 go unseen, so that a floor below about
    2e-5 does not hold.
    """
    return PeerBackoff(
        init_scale=init_scale,
        growth_factor=scale_factor,
        backoff_factor=1.0 / scale_factor,
        growth_interval=scale_window,
        min_scale=min_scale,
        max_scale=FLOAT32_MAX,
        quirks=Quirks(arithmetic="wide", at_max="keep", floor_resolution=1e-5),
    )
