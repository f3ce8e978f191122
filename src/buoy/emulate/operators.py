"""What is known about operators: which move values, which autocast keeps in FP32.

Names are those of `torch.ops.aten`; people may also say what the function is called.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch._ops import OpOverload

from buoy.emulate.errors import UnknownOperatorError

__all__ = ["AUTOCAST", "LOSSES", "Plan", "has_own_kernel", "operators", "plan_of"]

LOSSES: tuple[str, ...] = (
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cross_entropy",
    "huber_loss",
    "mse_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "nll_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
)
"""Losses, which torch.autocast computes in FP32."""

AUTOCAST: tuple[str, ...] = (
    *LOSSES,
    *"acos asin cdist cosh cumprod cumsum erfinv exp expm1 layer_norm".split(),
    *"group_norm log log10 log1p log2 log_softmax norm pow prod reciprocal".split(),
    *"renorm rsqrt sinh softmax softplus sum tan vector_norm".split(),
)
"""All that torch.autocast computes in FP32 on a GPU."""

_CALLED = {
    "batch_norm": ("native_batch_norm", "_native_batch_norm_legit"),
    "cross_entropy": ("_log_softmax", "nll_loss_forward", "nll_loss2d_forward"),
    "group_norm": ("native_group_norm",),
    "layer_norm": ("native_layer_norm",),
    "log_softmax": ("_log_softmax",),
    "multilabel_margin_loss": ("multilabel_margin_loss_forward",),
    "nll_loss": ("nll_loss_forward", "nll_loss2d_forward"),
    "norm": ("norm", "linalg_vector_norm"),
    "softmax": ("_softmax", "_safe_softmax"),
    "vector_norm": ("linalg_vector_norm",),
}

# What narrows its arguments even if one of them is FP32: a program in FP16 has to.
_NARROWING = frozenset(
    "addbmm addmm addmv addr baddbmm bmm convolution dot mm mv "
    "_scaled_dot_product_flash_attention_for_cpu _thnn_fused_gru_cell "
    "_thnn_fused_lstm_cell".split()
)
# What gives back values it was given: there is nothing to round.
_MOVING = frozenset(
    "_unsafe_view abs amax amin argsort cat clone constant_pad_nd copy embedding "
    "flip gather index index_select max max_pool2d_with_indices maximum min minimum "
    "neg ones_like relu repeat roll select_backward slice_backward sort stack "
    "threshold_backward topk tril triu unfold_backward where zeros_like".split()
)
# Elementwise, and rounded once more from FP32 the same as rounded at once: those of
# IEEE 754, as 24 bits are more than twice 11 and two; and those that do not round.
_ROUNDED_TWICE = frozenset(
    "add div eq ge gt isfinite isinf isnan le lt masked_fill mul ne pow rsub sign sub "
    "square".split()
)
# Running averages are FP32 and changed in place, which the schema does not say.
_LEFT_ALONE = {"native_batch_norm": {3, 4}, "_native_batch_norm_legit": {3, 4}}


@dataclass(frozen=True, slots=True)
class Plan:
    """What an operator's schema says once and for all."""

    name: str
    view: bool
    narrowing: bool
    moving: bool
    elementwise: bool  # and best left to torch's own kernel, where there is one
    written: frozenset[int]  # positions of arguments changed in place
    out: tuple[str, ...]  # names of `out=` arguments
    left_alone: frozenset[int]  # positions of arguments not to be rounded


@cache
def plan_of(operator: OpOverload) -> Plan:
    """Read an operator's schema."""
    name = operator._schema.name.rpartition("::")[2]
    if not name.startswith("__"):
        name = name.removesuffix("_")
    arguments = operator._schema.arguments
    moving = name in _MOVING
    written = frozenset(
        place
        for place, argument in enumerate(arguments)
        if _is_written(argument) and not argument.kwarg_only
    )
    out = (arg.name for arg in arguments if _is_written(arg) and arg.kwarg_only)
    pointwise = torch.Tag.pointwise in operator.tags
    return Plan(
        name=name,
        view=operator.is_view,
        narrowing=name in _NARROWING,
        moving=moving,
        elementwise=pointwise and not moving and name not in _ROUNDED_TWICE,
        written=written,
        out=tuple(out),
        left_alone=written | frozenset(_LEFT_ALONE.get(name, ())),
    )


def _is_written(argument: "torch._C.Argument") -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def has_own_kernel(
    plan: Plan, args: Sequence[object], kwargs: Mapping[str, object]
) -> bool:
    """Return whether torch's half kernel may give other bits than FP32 rounded does."""
    if plan.name in {"add", "sub", "rsub"}:
        return "alpha" in kwargs  # which the kernel rounds, too
    if plan.name == "pow":
        exponent = args[-1]
        return not (isinstance(exponent, int) and exponent in {2, 3})
    return plan.elementwise


def operators(names: str | Iterable[str]) -> frozenset[str]:
    """Turn names as people say them into names of operators.

    Example:
        >>> sorted(operators(["softmax", "exp"]))
        ['_safe_softmax', '_softmax', 'exp']
    """
    names = (names,) if isinstance(names, str) else tuple(names)
    for name in names:
        if name not in _CALLED and not hasattr(torch.ops.aten, name):
            raise UnknownOperatorError(name)
    return frozenset(part for name in names for part in _CALLED.get(name, (name,)))
