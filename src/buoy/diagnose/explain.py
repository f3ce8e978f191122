"""A culprit in words: what happened, where, by how much, what to do."""

import math
import textwrap

from buoy.diagnose.culprit import FP16_MAX, Culprit

__all__ = ["explain"]


def explain(culprit: Culprit, width: int = 80) -> str:
    """Say what went wrong and what to do about it."""
    parts = [_what(culprit), _how_far(culprit), _remedy(culprit)]
    return textwrap.fill(
        " ".join(part for part in parts if part),
        width,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _what(culprit: Culprit) -> str:
    forward = culprit.direction == "forward"
    start = "Forward, " if forward else "Backward, "
    if culprit.part == "input":
        return start + "the batch itself: what went into the model was not finite."
    if culprit.part == "loss":
        where = "the loss" if forward else "the gradient that arrives at it"
        return start + f"after the model: {where} is not finite, its output is."
    if culprit.part == "between":
        what = "a value" if forward else "a gradient"
        came = "what went in was"
    else:
        what = "its output" if forward else "the gradient of its input"
        came = "its input was" if forward else "the gradient that arrived was"
        if culprit.parameter:
            what = f"the gradient of its `{culprit.parameter}`"
    return f"{start}{_where(culprit)}: {what} is not finite, while {came}{_in(culprit)}"


def _where(culprit: Culprit) -> str:
    name = f"`{culprit.module}`" if culprit.module else "the model itself"
    kind = f" ({culprit.kind})" if culprit.kind else ""
    if culprit.part != "between":
        return name + kind
    last = culprit.after.rpartition(".")[2]
    following = culprit.before.rpartition(".")[2]
    place = f", after `{last}`" if last else ""
    place += f", before `{following}`" if following else ""
    return f"inside {name}{kind}{place}"


def _in(culprit: Culprit) -> str:
    size = culprit.input_amax
    return "." if size is None else f" (at most {size:.5g})."


def _how_far(culprit: Culprit) -> str:
    bits = culprit.headroom
    if bits is None or culprit.needed is None or culprit.poisoned:
        return ""
    if bits >= 0.0:
        return f"In FP32 it is {culprit.needed:.6g}, which fits: it overflows inside."
    return (
        f"In FP32 it reaches {culprit.needed:.6g}, {-bits:.1f} bits above FP16's "
        f"largest number, {FP16_MAX:g}."
    )


def _remedy(culprit: Culprit) -> str:
    if culprit.poisoned:
        names = ", ".join(f"`{name}`" for name in culprit.poisoned[:3])
        return f"Its {names} is not finite itself: go back to a checkpoint."
    if culprit.part == "input":
        return "Check the data: NaN or inf in the inputs makes every step fail."
    if culprit.direction == "forward":
        return f"No scale helps: the loss is scaled after it. {_forward(culprit)}"
    if culprit.cured_by in ("model", "nothing"):
        return (
            f"No scale helps: at scale 1 it is not finite either. {_backward(culprit)}"
        )

    fitting = culprit.fitting_scale
    if fitting is not None and culprit.scale is not None:
        return (
            f"The scale was {_power(culprit.scale)}; it would have fitted at "
            f"{_power(fitting)}."
        )
    fits = "at scale 1 it fits" if culprit.cured_by == "scale" else "a lower may fit"
    if culprit.scale is not None:
        return f"The scale was {_power(culprit.scale)}; {fits}."
    return "If it fits at a lower scale, only the scale is wrong."


def _backward(culprit: Culprit) -> str:
    if culprit.cured_by == "model":
        return "With the whole model in FP32 it is finite: keep this module in FP32."
    return (
        "Look for a square root, a norm, a logarithm or a division at 0: their "
        "gradients are infinite there."
    )


_AT_ZERO = (
    "Look for a logarithm or a division of 0, or an exponential of a large number, and "
    "limit its input, e.g. with `clamp`."
)


def _forward(culprit: Culprit) -> str:
    """Advise what was tried and helped; say what was tried and did not."""
    if culprit.cured_by == "nothing":
        return f"FP32 does not help either: it is not finite there. {_AT_ZERO}"
    if culprit.part == "loss":
        if culprit.cured_by:
            return "In FP32 it is finite: compute the loss in FP32 (`output.float()`)."
        return (
            "Compute the loss in FP32 (`output.float()`). If that does not help: "
            f"{_lower(_AT_ZERO)}"
        )
    keep = f'`buoy.torch.keep_fp32(model, "{culprit.module}")`'
    if culprit.cured_by == "module":
        return (
            f"With this module in FP32 the forward pass is finite: {keep}. Or make its "
            "inputs or weights smaller."
        )
    if culprit.cured_by == "model":
        return (
            "With this module alone in FP32 the forward pass is still not finite; with "
            "the whole model in FP32 it is. Keep modules before and after it in FP32 "
            "too (`buoy.torch.keep_fp32` takes several), or make its inputs or weights "
            "smaller."
        )
    return (
        f"It was not tried in FP32. If it is finite there, keep this module in FP32: "
        f"{keep}. Otherwise {_lower(_AT_ZERO)}"
    )


def _lower(sentence: str) -> str:
    return sentence[0].lower() + sentence[1:]


def _power(scale: float) -> str:
    if scale > 0 and math.log2(scale).is_integer():
        return f"2^{math.log2(scale):.0f}"
    return f"{scale:g}"
