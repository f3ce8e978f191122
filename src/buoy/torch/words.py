"""The longer messages: what happened, where, why it matters, what to do."""

from collections.abc import Iterable

import torch

from buoy.torch.errors import (
    BeforeScaleError,
    ClosureError,
    DeviceModeError,
    DtypeDriftError,
    Fp16GradientsError,
    GradientsChangedError,
    MasterWeightsError,
    NewScaleError,
    NoGradientsError,
    NothingRecordedError,
    OptimizerInBackwardError,
    OptionError,
    StepTwiceError,
    UnscaleAfterStepError,
    UnscaleTwiceError,
)

__all__ = [
    "before_scale",
    "changed",
    "closure",
    "closure_never_syncs",
    "closure_not_called",
    "closure_returns_scaled",
    "closure_spikes",
    "closure_unscaled",
    "closure_updates",
    "closure_without_loss",
    "drifted",
    "fixed_scale",
    "fp16_gradients",
    "in_backward",
    "masters_twice",
    "narrow_state",
    "no_grad_dtype",
    "no_gradients",
    "no_setting",
    "nothing_recorded",
    "outside",
    "setting",
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


def fixed_scale(policy: str) -> NewScaleError:
    """Say that a policy has no scale to set."""
    return NewScaleError(
        f"The policy {policy} has no scale of its own to set, so `update(new_scale)` "
        "would change nothing. Choose another policy, or leave `new_scale` out."
    )


def setting(name: str, value: object) -> OptionError:
    """Say that a factor or an interval would spoil the scale."""
    return OptionError(
        f"`{name}` must be a finite number, and a factor one above 0, got {value!r}: "
        "the scale would become 0, negative or NaN."
    )


def no_setting(policy: str, name: str) -> OptionError:
    """Say that a policy does not have one of torch's settings."""
    return OptionError(
        f"The policy {policy} has no `{name}`, so setting it would change nothing. "
        "Use `policy=None` for torch's rule, or 'backoff', which has all three."
    )


def outside(value: float, low: float, high: float) -> NewScaleError:
    """Say that a scale lies outside of the bounds that were given."""
    return NewScaleError(
        f"new_scale {value!r} lies outside of `min_scale` {low!r} .. `max_scale` "
        f"{high!r}, which were given for this scaler. Stay within them, or make a "
        "scaler with other bounds."
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


def changed(method: str) -> GradientsChangedError:
    """Say that other gradients lie there now than those that were looked at."""
    return GradientsChangedError(
        f"{method}() meets other gradients than those that were unscaled or clipped: "
        "another loss was scaled and another backward pass ran since. They are still "
        "multiplied by the scale, and nobody has checked them. Unscale and clip after "
        "the last backward pass of an iteration, and call `scaler.update()` once per "
        "iteration, also for a batch that you drop."
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
    """Say what torch says of a closure, where its letter is wanted."""
    return ClosureError(
        "Closure use is not currently supported if GradScaler is enabled. With "
        "`strict_torch=True` Buoy refuses it as torch does: the optimizer would call "
        "it itself and see gradients multiplied by the scale. Leave `strict_torch` out."
    )


def closure_unscaled() -> ClosureError:
    """Say that a closure called `backward` on a bare loss."""
    return ClosureError(
        "The closure called `backward()` on a loss that was not scaled, so its FP16 "
        "gradients have underflowed and must not be divided by the scale. Write "
        "`scaler.scale(loss).backward(); return loss` in it, or only `return loss` "
        "and leave the rest to `scaler.step`. Nothing was changed."
    )


def closure_returns_scaled() -> ClosureError:
    """Say that a closure returned the scaled loss."""
    return ClosureError(
        "The closure returned the scaled loss. The optimizer compares it with others "
        "and with gradients that are unscaled. Keep both apart: "
        "`scaler.scale(loss).backward(); return loss`. Nothing was changed."
    )


def closure_without_loss(got: object) -> ClosureError:
    """Say that a closure neither called `backward` nor returned a loss."""
    return ClosureError(
        f"The closure returned {got!r:.60} and called no `backward()`, so there is "
        "nothing to step by. Let it return the loss as a tensor with its graph: not "
        "`loss.item()`, not detached. Nothing was changed."
    )


def closure_updates() -> ClosureError:
    """Say that a closure moved the scale."""
    return ClosureError(
        "The closure called `scaler.update()` or `scaler.step()`: the scale must stay "
        "as it is until the optimizer has finished evaluating. Call `update()` once, "
        "after `scaler.step(optimizer, closure)`. Nothing was changed."
    )


def closure_not_called(kind: str) -> ClosureError:
    """Say that an optimizer ignored its closure."""
    return ClosureError(
        f"{kind} stepped without calling the closure, so by gradients that nothing "
        "has checked; the step was taken back. Compute them before it: "
        "`scaler.scale(loss).backward()`, then `scaler.step(optimizer)`."
    )


def closure_spikes() -> ClosureError:
    """Say that evaluations of a line search are no batches."""
    return ClosureError(
        "`spike_guard` does not go with a closure: an optimizer evaluates where it "
        "will not stay, so the norms there say nothing about the batch. Use a scaler "
        "without `spike_guard` for this optimizer."
    )


def closure_never_syncs() -> DeviceModeError:
    """Say that closures ask the device."""
    return DeviceModeError(
        "Neither `sync='never'` nor torch.compile goes with a closure: whether an "
        "evaluation overflowed decides whether the optimizer goes on. Use a scaler "
        "with `sync='auto'`, outside of compiled functions."
    )


def fp16_gradients(described: tuple[str, ...]) -> Fp16GradientsError:
    """List the parameters that are FP16."""
    return Fp16GradientsError(
        f"Attempting to unscale FP16 gradients. {len(described)} parameters of this "
        f"optimizer are torch.float16: {_listed(described)}. Dividing their gradients "
        "by the scale would underflow, and updates smaller than 1/2048 of a weight "
        "would be lost. Keep the parameters in float32 (`model.float()`) and use "
        "`torch.autocast(..., torch.float16)` for the forward pass; or let Buoy keep "
        "FP32 copies of them: `GradScaler(..., fp16_params='master')`."
    )


def drifted(described: tuple[str, ...], dtype: torch.dtype) -> DtypeDriftError:
    """List the parameters that were cast in the course of training."""
    return DtypeDriftError(
        f"Attempting to unscale FP16 gradients. {len(described)} parameters of this "
        f"optimizer were float32 and are {dtype} now: {_listed(described)}. Something "
        "cast them between two steps, such as `model.half()` before a validation or "
        "an export, and what FP32 held beyond that is lost. Go back to a checkpoint, "
        "and cast a copy next time: `copy.deepcopy(model).half()`."
    )


def masters_twice() -> MasterWeightsError:
    """Say that an optimizer has masters already."""
    return MasterWeightsError(
        "This optimizer has master weights already; a second set would never be "
        "updated. Use the `MasterWeights` that was made first, or build the optimizer "
        "anew."
    )


def narrow_state(described: str) -> MasterWeightsError:
    """Say that an optimizer's state has been cast to half precision."""
    return MasterWeightsError(
        f"The optimizer's state for {described} is in half precision already: it "
        "stepped or loaded a checkpoint before it had master weights, and torch casts "
        "a loaded state to the parameters' dtype. Call "
        "`buoy.torch.MasterWeights(optimizer)` right after building the optimizer, "
        "before `optimizer.load_state_dict(...)` and before its first step."
    )


def no_grad_dtype() -> MasterWeightsError:
    """Say that torch is too old for FP32 gradients of FP16 parameters."""
    return MasterWeightsError(
        f"torch {torch.__version__} cannot hold an FP32 gradient of an FP16 parameter, "
        "so it could not be unscaled without loss. Use torch 2.10 or newer, or keep "
        "the parameters in float32 and use `torch.autocast(..., torch.float16)`."
    )


def _listed(described: tuple[str, ...], most: int = 8) -> str:
    more = len(described) - most
    return ", ".join(described[:most]) + (f" and {more} more" if more > 0 else "")


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


def in_backward(
    names: tuple[str, ...], *, put_back: bool = False
) -> OptimizerInBackwardError:
    """Say why an optimizer must not step inside the backward pass."""
    shown = ", ".join(f"`{name}`" for name in names[:3]) or "a parameter"
    seen = f"{shown} has a post-accumulate-grad hook that calls one"
    if put_back:
        seen = (
            f"a hook changed {shown} in it. The weights were put back, an optimizer's "
            "own state was not"
        )
    return OptimizerInBackwardError(
        f"An optimizer steps inside the backward pass: {seen}. It sees gradients "
        "multiplied by the scale, and an overflow found later in the same pass would "
        "leave some parameters updated and others not. Remove the hooks and call "
        "`scaler.step(optimizer)` after `backward()`; or keep them and train in BF16 "
        "or FP32 without a scaler (`enabled=False`)."
    )
