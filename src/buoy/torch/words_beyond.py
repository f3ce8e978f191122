"""The longer messages of groups, re-runs, guards, windows and local scales."""

from typing import Any

from buoy.torch.errors import (
    AccumulateError,
    GroupError,
    GuardError,
    LocalScalesError,
    MixedScalesError,
    OptionError,
    RunError,
)

__all__ = [
    "HALF_A_STEP",
    "NO_MICRO",
    "block_elsewhere",
    "block_in_block",
    "group_made_before",
    "group_of_group",
    "group_option",
    "group_run",
    "group_update",
    "half_parameter",
    "no_model",
    "not_a_module",
    "nothing_to_combine",
    "other_blocks",
    "other_group",
    "retries",
    "retry_on",
    "run_mid_iteration",
    "run_without_model",
    "run_without_step",
    "sharded_parameter",
    "shared_parameter",
    "which_blocks",
    "window_full",
    "window_in_window",
    "window_mid_iteration",
    "window_no_sync",
    "window_open",
    "window_size",
    "window_without_optimizer",
    "written_input",
]

HALF_A_STEP = (
    "`run` did not run this batch again: one optimizer had stepped already while "
    "another was skipped, and stepping twice on one batch would be wrong. Pass "
    "`skip='joint'` to GradScaler, so that all of them step or none."
)
NO_MICRO = (
    "The function given to `window.run` ended without a gradient: it has to compute "
    "the loss, scale it and call `backward()`."
)


def group_of_group(name: str, wanted: str) -> GroupError:
    """Say that groups do not nest."""
    return GroupError(
        f"Group {name!r} cannot have a group {wanted!r} of its own: only one `update` "
        f"moves them all. Ask the scaler itself: `scaler.group({wanted!r})`."
    )


def group_made_before(name: str, options: dict[str, Any]) -> GroupError:
    """Say that a group's options are settled."""
    given = ", ".join(f"{key}={value!r}" for key, value in options.items())
    return GroupError(
        f"Group {name!r} exists already, so {given} would come too late: its scale is "
        "in use. Give options with the first `scaler.group(...)` of that name."
    )


def group_option(name: str, wrong: list[str], accepted: tuple[str, ...]) -> GroupError:
    """Say which options a group may have of its own."""
    return GroupError(
        f"Group {name!r} cannot have its own {', '.join(wrong)}: that belongs to the "
        f"scaler as a whole. A group may differ in {', '.join(accepted)}."
    )


def group_update(name: str) -> GroupError:
    """Say who updates a group."""
    return GroupError(
        f"`update` was called on group {name!r}. Its scale would move before the "
        "others have stepped, and twice per iteration. Call `scaler.update()` once, "
        "after every optimizer has stepped: it moves all groups."
    )


def group_run(name: str) -> GroupError:
    """Say who runs steps."""
    return GroupError(
        f"`run` was called on group {name!r}, but a step belongs to all groups: call "
        "`scaler.run(...)` and use the groups inside."
    )


def nothing_to_combine() -> GroupError:
    """Say what `backward` takes."""
    return GroupError(
        "`scaler.backward` takes losses by group and the optimizers that hold their "
        "parameters, and one of the two was empty: "
        "`scaler.backward({'policy': loss_p, 'value': loss_v}, optimizer)`."
    )


def other_group(name: str, others: list[str], *, mixed: bool) -> MixedScalesError:
    """Say that gradients carry another group's scale."""
    mine = f"group {name!r}" if name else "the scaler itself"
    theirs = ", ".join(
        repr(other) if other else "the scaler itself" for other in others
    )
    if mixed:
        return MixedScalesError(
            f"Losses of {mine} and of {theirs} were added up in the same gradients. "
            "Each is multiplied by a scale of its own, so their sum cannot be "
            "unscaled. Run them by `scaler.backward({group: loss, ...}, optimizer)`, "
            "which unscales each before it is added; or clear the gradients between "
            "them (`optimizer.zero_grad()`); or scale both with one group."
        )
    return MixedScalesError(
        f"This optimizer was to step with {mine}, but its gradients come from a loss "
        f"of {theirs}: they would be divided by the wrong scale. Step it with the "
        "group that scaled its loss."
    )


def not_a_module(thing: object) -> GuardError:
    """Say what can be guarded."""
    return GuardError(
        f"`guard` takes torch.nn.Module objects, whose buffers it puts back after a "
        f"skipped step; got {type(thing).__name__} {thing!r:.60}. For schedulers, "
        "averages and counters use `scaler.gate(...)`."
    )


def retries(given: object) -> OptionError:
    """Say what `retries` may be."""
    return OptionError(
        f"`retries` must be a whole number of at least 0, got {given!r}: it bounds "
        "how often one batch may be run again."
    )


def retry_on(given: object) -> OptionError:
    """Say what a re-run can cure."""
    return OptionError(
        f"`retry_on` must be among 'scale_too_high', 'bad_batch' and 'divergence', got "
        f"{given!r}. Other verdicts would come back the same at any scale: a loss that "
        "is inf or NaN by itself, poisoned weights, gradients never cleared."
    )


def run_without_model() -> RunError:
    """Say that buffers are unknown."""
    return RunError(
        "`run` does not know which modules a re-run must put back: batch statistics "
        "would count the same batch twice, without a word. Build the scaler with "
        "`model=...`, or pass `modules=[...]`; if no module has buffers, pass "
        "`modules=()`."
    )


def run_without_step() -> RunError:
    """Say that nothing was stepped."""
    return RunError(
        "`run` has nothing to step: no optimizer was passed and the function did not "
        "call `scaler.step` itself, so nobody knows whether the batch counted. Write "
        "`scaler.run(step_fn, optimizer)`."
    )


def run_mid_iteration() -> RunError:
    """Say that an iteration is already under way."""
    return RunError(
        "`run` was called in the middle of an iteration: gradients have been unscaled "
        "or stepped since the last `update()`, and a re-run could not take that back. "
        "Let the function given to `run` be the whole step."
    )


def window_size(given: object) -> AccumulateError:
    """Say what `n` is."""
    return AccumulateError(
        f"`accumulate` takes the number of micro-batches in a window, a whole number "
        f"of at least 1; got {given!r}."
    )


def window_without_optimizer() -> AccumulateError:
    """Say whose gradients to keep."""
    return AccumulateError(
        "`accumulate` does not know whose gradients to keep apart: this scaler has "
        "stepped no optimizer yet. Write `scaler.accumulate(n, optimizer)`."
    )


def window_in_window() -> AccumulateError:
    """Say that windows do not nest."""
    return AccumulateError(
        "A window of micro-batches is open already; a second one inside it would keep "
        "the same gradients apart twice. Close the first by leaving its `with` block."
    )


def window_mid_iteration() -> AccumulateError:
    """Say that a window starts an iteration."""
    return AccumulateError(
        "A window was opened in the middle of an iteration: gradients have been "
        "unscaled or stepped since the last `update()`. Call `scaler.update()` before "
        "the next window."
    )


def window_full(most: int) -> AccumulateError:
    """Say that more losses came than were announced."""
    return AccumulateError(
        f"More than {most} losses were scaled in a window of {most} micro-batches. "
        "Every loss that is scaled inside counts as one: add up the losses of one "
        "micro-batch before scaling, or open a window per step."
    )


def window_no_sync() -> AccumulateError:
    """Say why gradients must be shared in every micro-batch."""
    return AccumulateError(
        "A loss was scaled inside `no_sync()` and inside a window of micro-batches. "
        "The window keeps each micro-batch's gradients apart, so those that are not "
        "shared between ranks now never would be, and the ranks' weights would drift "
        "apart. Leave `no_sync()` out, or do without the window."
    )


def window_open(method: str) -> AccumulateError:
    """Say that a window must be left first."""
    return AccumulateError(
        f"`{method}` was called inside a window of micro-batches, whose gradients are "
        "still kept apart. Leave the `with scaler.accumulate(...)` block first; the "
        "scale does not move inside it."
    )


def no_model(thing: object) -> LocalScalesError:
    """Say what `local_scales` takes."""
    return LocalScalesError(
        "`local_scales` takes a torch.nn.Module whose blocks are to have own scales, "
        f"got {type(thing).__name__} {thing!r:.60}."
    )


def which_blocks(given: object) -> LocalScalesError:
    """Say how blocks are named."""
    return LocalScalesError(
        f"`blocks={given!r:.80}` names no block of this model. Give the modules in the "
        "order of the forward pass, their names, the name of the ModuleList that holds "
        "them ('layers'), or their class."
    )


def block_elsewhere(block: object) -> LocalScalesError:
    """Say that a block is not in the model."""
    return LocalScalesError(
        f"A {type(block).__name__} given as a block is no module of this model: the "
        "model was copied or wrapped since, and its gradients pass elsewhere. Take the "
        "blocks from the model as it is now."
    )


def block_in_block(name: str, other: str) -> LocalScalesError:
    """Say that blocks may not overlap."""
    return LocalScalesError(
        f"Block `{name}` and block `{other}` overlap: the parameters they share would "
        "be divided by two factors. Give blocks that lie beside each other."
    )


def shared_parameter(name: str, other: str) -> LocalScalesError:
    """Say that a shared parameter has no one factor."""
    return LocalScalesError(
        f"`{name}` and `{other}` are one parameter, used inside a block and elsewhere: "
        "its gradient would be a sum of parts with different factors, which cannot be "
        "divided. Untie them, or leave that block out."
    )


def half_parameter(name: str) -> LocalScalesError:
    """Say why parameters must be FP32."""
    return LocalScalesError(
        f"`{name}` is torch.float16: its gradient, divided by the block's factor, "
        "would leave FP16's range again, which is what local scales are for. Keep "
        "parameters in float32 and use `torch.autocast(..., torch.float16)`."
    )


def sharded_parameter(name: str) -> LocalScalesError:
    """Say why sharded parameters are refused."""
    return LocalScalesError(
        f"`{name}` is a DTensor: fully sharded and tensor-parallel layers compute with "
        "other tensors than their parameters, whose gradients a hook on the parameter "
        "does not see. Local scales work with plain and DistributedDataParallel models."
    )


def written_input(name: str) -> LocalScalesError:
    """Say why a block must not write into its input."""
    return LocalScalesError(
        f"Block `{name}` writes into its input in place (an activation with "
        "`inplace=True`, or `x += ...`). Inside a block with a scale of its own that "
        "input is another tensor over the same memory: whoever uses it outside would "
        "see the new values and the old gradient. Set `inplace=False`."
    )


def other_blocks(saved: list[str], names: tuple[str, ...]) -> LocalScalesError:
    """Say that a state belongs to other blocks."""
    return LocalScalesError(
        f"The loaded state is of {len(saved)} blocks ({', '.join(saved[:3])}, ...), "
        f"these are {len(names)} ({', '.join(names[:3])}, ...). Load it into local "
        "scales of the same blocks, or start without: they are found again in a few "
        "steps."
    )
