"""The longer messages: what happened, where, why it matters, what to do."""

from collections.abc import Iterable

import torch

from buoy.torch.errors import (
    BeforeScaleError,
    ClosureError,
    Fp16GradientsError,
    NoGradientsError,
    NothingRecordedError,
    OptimizerInBackwardError,
    StepTwiceError,
    UnscaleAfterStepError,
    UnscaleTwiceError,
)

__all__ = [
    "before_scale",
    "closure",
    "fp16_gradients",
    "in_backward",
    "no_gradients",
    "nothing_recorded",
    "step_twice",
    "unscale_after_step",
    "unscale_twice",
    "unscaled_elsewhere",
]


def before_scale(method: str, missing: str) -> BeforeScaleError:
    """Say that no loss was scaled yet."""
    return BeforeScaleError(
        f"Attempted {method} but {missing} is None.  This may indicate your script did "
        "not use scaler.scale(loss or outputs) earlier in the iteration. The gradients "
        "would be taken for scaled ones and be divided by a scale that they do not "
        "have. Call `scaler.scale(loss).backward()` before it."
    )


def step_twice() -> StepTwiceError:
    """Say that an update is missing between two steps."""
    return StepTwiceError(
        "step() has already been called since the last update(). A second step would "
        "apply the same gradients again. Call `scaler.update()` once per iteration, "
        "after every optimizer has stepped; if the loop has no `update()` at all, the "
        "scale would never move."
    )


def unscale_twice() -> UnscaleTwiceError:
    """Say that the gradients are unscaled already."""
    return UnscaleTwiceError(
        "unscale_() has already been called on this optimizer since the last update(). "
        "Dividing by the scale twice would make the gradients far too small. Unscale "
        "once per iteration, after the last backward pass; if `update()` is missing "
        "from the loop, add it after `step`."
    )


def unscaled_elsewhere() -> UnscaleTwiceError:
    """Say that two objects stand for one optimizer."""
    return UnscaleTwiceError(
        "The gradients of this optimizer were unscaled already, through another object "
        "with the same `param_groups`: a wrapper of it, or what it wraps. Dividing by "
        "the scale twice would make them far too small. Pass the same object to "
        "`unscale_`, `clip_grad_norm_` and `step`."
    )


def unscale_after_step(method: str) -> UnscaleAfterStepError:
    """Say that it is too late to touch the gradients."""
    return UnscaleAfterStepError(
        f"{method}() is being called after step(). The weights have been updated "
        f"already. Call `{method}` between `backward()` and `step`, and `update()` "
        "at the end of the iteration."
    )


def nothing_recorded() -> NothingRecordedError:
    """Say that no optimizer was stepped before the update."""
    return NothingRecordedError(
        "No inf checks were recorded prior to update. No optimizer was stepped or "
        "unscaled since the last update(), or none of its parameters had a gradient, "
        "so nothing says which way the scale should move. Call `scaler.step(optimizer)`"
        " before `scaler.update()`; with accumulation, call both once per window."
    )


def closure() -> ClosureError:
    """Say why a closure cannot simply be passed on."""
    return ClosureError(
        "Closure use is not currently supported if GradScaler is enabled. The "
        "optimizer would call it itself and see gradients multiplied by the scale. "
        "Compute the gradients before `scaler.step(optimizer)`, or pass "
        "`enabled=False` for LBFGS "
        "and other optimizers that need one."
    )


def fp16_gradients(params: list[torch.Tensor]) -> Fp16GradientsError:
    """List the parameters that are FP16."""
    shapes = ", ".join("x".join(map(str, p.shape)) or "scalar" for p in params[:5])
    more = f" and {len(params) - 5} more" if len(params) > 5 else ""
    return Fp16GradientsError(
        f"Attempting to unscale FP16 gradients. {len(params)} parameters of this "
        f"optimizer are torch.float16 (shapes {shapes}{more}): dividing their "
        "gradients by the scale would underflow, and updates smaller than 1/1024 of a "
        "weight would be lost. Keep the parameters in float32 (`model.float()`) and "
        "use `torch.autocast(..., torch.float16)` for the forward pass."
    )


def no_gradients(causes: Iterable[str]) -> NoGradientsError:
    """Say why an optimizer's parameters may have no gradient."""
    found = " ".join(causes)
    if not found:
        found = (
            "The usual causes: the loss was detached or computed under no_grad(); "
            "the model was moved, wrapped or re-created after the optimizer was built, "
            "so that it holds other parameters; no parameter requires grad; or "
            "`zero_grad()` was called after `backward()`."
        )
    return NoGradientsError(
        "No inf checks were recorded for this optimizer. None of its parameters has a "
        f"gradient, so nothing was applied. {found}"
    )


def in_backward(names: tuple[str, ...]) -> OptimizerInBackwardError:
    """Say why an optimizer must not step inside the backward pass."""
    shown = ", ".join(f"`{name}`" for name in names[:3]) or "a parameter"
    return OptimizerInBackwardError(
        f"An optimizer steps inside the backward pass: {shown} has a "
        "post-accumulate-grad hook that calls one. It would see gradients multiplied "
        "by the scale, and an overflow found later in the same pass would leave some "
        "parameters updated and others not. Remove the hooks and call "
        "`scaler.step(optimizer)` after `backward()`; or keep them and train in BF16 "
        "or FP32 without a scaler (`enabled=False`)."
    )
