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
    what = "its output" if forward else "the gradient of its input"
    if culprit.parameter:
        what = f"the gradient of its `{culprit.parameter}`"
    came = "its input was" if forward else "the gradient that arrived was"
    if culprit.part == "between":
        what, came = "a value" if forward else "a gradient", "what went in was"
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
        return "Look at the data: NaN or inf in the inputs makes every step fail."
    if culprit.direction == "forward":
        return _forward_remedy(culprit)
    fitting = culprit.fitting_scale
    if fitting is not None and culprit.scale is not None:
        return (
            f"The scale was {_power(culprit.scale)}; it would have fitted at "
            f"{_power(fitting)}."
        )
    if culprit.scale is not None:
        return f"The scale was {_power(culprit.scale)}; a lower one may fit."
    return "If it fits at a lower scale, nothing is wrong but the scale."


def _forward_remedy(culprit: Culprit) -> str:
    if culprit.part == "loss":
        return (
            "No scale helps. Compute the loss in FP32 (`output.float()`), and look for "
            "a logarithm or a division of 0."
        )
    if culprit.headroom is not None and culprit.headroom >= 0.0:
        place = "the part of it that overflows"
    else:
        place = "this module"
    return (
        f"No scale helps: the loss is scaled after it. Keep {place} in FP32 "
        "(`torch.autocast(..., enabled=False)` around it), or make its inputs or "
        "weights smaller."
    )


def _power(scale: float) -> str:
    exponent = math.log2(scale) if scale > 0 else math.nan
    return f"2^{exponent:.0f}" if exponent.is_integer() else f"{scale:g}"
