"""The exceptions of the PyTorch front end, by what a user would do about them.

`OptionError` (pass another argument) and `CallOrderError` (change the loop) come from
the core.  Where `torch.amp.GradScaler` refuses the same call, the error is also of
torch's exception type and its message starts with torch's words, so that code written
for one catches the errors of the other.  Functions make the errors with long messages:
what happened, why it matters, what to do.
"""

from buoy._core.errors import (
    BuoyError,
    CallOrderError,
    DeviceModeError,
    StateVersionError,
)


class Fp16ParametersError(BuoyError, ValueError, RuntimeError):
    """Parameters are in half precision: keep FP32 ones, or FP32 masters of them."""


class NonfiniteNormError(BuoyError, RuntimeError):
    """The norm to clip by is inf or NaN, and `error_if_nonfinite` was set."""


class StateError(StateVersionError, RuntimeError, KeyError):
    """A state to load is empty, damaged, or of another release."""

    __str__ = BuoyError.__str__  # a KeyError would quote its message


def before_scale(method: str, missing: str = "_scale") -> CallOrderError:
    """Return the error for a call before any loss was scaled."""
    return CallOrderError(
        f"Attempted {method} but {missing} is None.  This may indicate your script did "
        "not use scaler.scale(loss or outputs) earlier in the iteration. The gradients "
        "would be divided by a scale that they were not multiplied by. Call "
        "`scaler.scale(loss).backward()` first."
    )


def step_twice() -> CallOrderError:
    """Return the error for a missing `update` between two steps."""
    return CallOrderError(
        "step() has already been called since the last update(). A second step would "
        "apply the same gradients again. Call `scaler.update()` once per iteration, "
        "after every optimizer has stepped; without it the scale never changes."
    )


def scaled_before_update() -> CallOrderError:
    """Return the error for gradients of an earlier iteration's scale."""
    return CallOrderError(
        "No loss was scaled since the last update() or load_state_dict(): these "
        "gradients were multiplied by an earlier scale, and would be divided by "
        "another. Call `scaler.update()` once per iteration, after every optimizer has "
        "stepped. If a training library calls it after each optimizer, pass "
        "`managed=True` to the scaler. With scale groups, step with the group that "
        "scaled the loss."
    )


def unscale_twice() -> CallOrderError:
    """Return the error for gradients that are already unscaled."""
    return CallOrderError(
        "unscale_() has already been called on this optimizer since the last update(). "
        "Dividing by the scale twice would make the gradients far too small. Unscale "
        "once per iteration, after the last backward pass, then step and update."
    )


def unscaled_elsewhere() -> CallOrderError:
    """Return the error for two optimizers that have the same gradients."""
    return CallOrderError(
        "The gradients of this optimizer were already checked or unscaled through "
        "another object: a wrapper of it, or an optimizer with the same parameters. "
        "Dividing by the scale twice would make them far too small. Pass the same "
        "object to `unscale_`, `clip_grad_norm_` and `step`, and each parameter once."
    )


def shared_gradient(names: tuple[str, ...]) -> CallOrderError:
    """Return the error for one gradient of several parameters of an optimizer."""
    return CallOrderError(
        "Several parameters of this optimizer have the same tensor as `.grad`, or one "
        f"parameter is listed twice: {', '.join(names)!s:.200}. It would be divided by "
        "the scale repeatedly. List each parameter once; copy a shared gradient."
    )


def changed(method: str) -> CallOrderError:
    """Return the error for gradients that changed after they were inspected."""
    return CallOrderError(
        f"{method}() found gradients that have changed since they were unscaled or "
        "clipped: another backward pass has run, or a parameter group was added. They "
        "were not checked and are still multiplied by the scale. Unscale and clip "
        "after the last backward pass of an iteration, and call `scaler.update()` once "
        "per iteration, also for a batch that you drop."
    )


def unscale_after_step(method: str) -> CallOrderError:
    """Return the error for unscaling or clipping after the step."""
    return CallOrderError(
        f"{method}() is being called after step(). The weights have been updated "
        f"already. Call `{method}` between `backward()` and `step`, and `update()` at "
        "the end of the iteration."
    )


def nothing_recorded() -> CallOrderError:
    """Return the error for an `update` without a step."""
    return CallOrderError(
        "No inf checks were recorded prior to update. No optimizer was stepped or "
        "unscaled since the last update(), or none of its parameters had a gradient, "
        "so the scale cannot be updated. Call `scaler.step(optimizer)` before "
        "`scaler.update()`; with gradient accumulation, call both once per window."
    )


def no_gradients(cause: str = "") -> CallOrderError:
    """Return the error for an optimizer without gradients."""
    usual = (
        "The usual causes: the loss was detached or computed under no_grad(); the "
        "model was moved, wrapped or re-created after the optimizer was built; no "
        "parameter requires grad; or `zero_grad()` was called after `backward()`."
    )
    return CallOrderError(
        "No inf checks were recorded for this optimizer. None of its parameters has a "
        f"gradient, so nothing was applied. {cause or usual}"
    )


def mid_iteration() -> CallOrderError:
    """Return the error for pickling or copying between a step and its update."""
    return CallOrderError(
        "A GradScaler instance may only be pickled at the beginning of an iteration, "
        "or at the end after scaler.update(). In between it refers to gradients that "
        "are not part of it."
    )


def nonfinite_norm(order: float) -> NonfiniteNormError:
    """Return the error for a norm that is not finite."""
    return NonfiniteNormError(
        f"The total norm of order {order} for gradients from `parameters` is "
        "non-finite, so it cannot be clipped. With loss scaling an overflow now and "
        "then is normal and its step is skipped: leave `error_if_nonfinite=False`."
    )


def untraced(what: str) -> DeviceModeError:
    """Return the error for what a compiled step cannot contain."""
    return DeviceModeError(
        f"torch.compile does not trace {what}. Otherwise, leave all of `unscale_`, "
        "`clip_grad_norm_`, `step` and `update` out of the compiled function; the "
        "model may stay in it."
    )


CLIPPED_IN_GRAPH = "a part of a step: this one would ignore the graph's clipping"
PASSES_ITSELF = (
    "GradScaler is going to stop passing itself as a keyword argument to the passed "
    "optimizer. In the near future GradScaler registers `grad_scale: Tensor` and "
    "`found_inf: Tensor` to the passed optimizer and let the optimizer use them "
    "directly."
)
ALONE_WITH_SHARDS = (
    "This scaler decides alone (`process_group=()`), but its parameters are sharded "
    "over ranks (DTensor). One rank would skip a step that the others apply, and clip "
    "by the norm of its shard. Leave `process_group` out, or pass the ranks' group."
)
JOIN = (
    "torch.distributed's Join does not work with a scaler: a rank without data would "
    "have to repeat what the other ranks do. Pass the same number of batches to every "
    "rank, or let a rank without data run a last batch with a loss of zero "
    "(`model(batch).sum() * 0`)."
)
UNSCALED_EARLY = (
    "They have gradients now: `unscale_` was called before `backward()`. Call it after "
    "the last backward pass of the iteration."
)
FUSED_DAMPENING = (
    "A fused SGD with `dampening` cannot start under a scaler: dampening does not "
    "apply to the first momentum, and only the device knows whether the first step is "
    "skipped. Build it with `fused=False`, or without dampening. Nothing was applied."
)
