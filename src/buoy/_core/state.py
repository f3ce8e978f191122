"""The data between a step and its policy: `Seen` and `Step`."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TypeVar

from buoy._core.ops import Scalar
from buoy._core.verdicts import Verdict

__all__ = ["Seen", "Step", "Verdict", "map_state"]

_S = TypeVar("_S")


def map_state(function: Callable[[Scalar], Scalar], state: _S) -> _S:
    """Apply a function to every number of a state, e.g. to lift it onto a device.

    Example:
        >>> map_state(lambda x: x * 2, Seen(finite=1, amax_log2=3.0))
        Seen(finite=2, amax_log2=6.0, underflow=None, norm_log2=None, loss_finite=None)
    """
    values = {
        field.name: None if value is None else function(value)
        for field in fields(state)  # type: ignore[arg-type]
        for value in [getattr(state, field.name)]
    }
    return type(state)(**values)


@dataclass(frozen=True, slots=True)
class Seen:
    """The findings about one step's gradients, combined over all ranks.

    `None` means "not measured".  The fields may be tensors or tracers, so they are not
    validated.

    Example:
        >>> Seen(finite=True, amax_log2=3.5).amax_log2
        3.5
    """

    finite: Scalar  # bool []: no inf or NaN in any gradient
    amax_log2: Scalar = None  # float32 []: log2 of the largest |scaled gradient|
    underflow: Scalar = None  # float32 []: share of nonzero scaled gradients < 2^-20
    norm_log2: Scalar = None  # float32 []: log2 of their norm, where they are clipped
    loss_finite: Scalar = None  # bool []: no loss was inf or NaN before it was scaled


@dataclass(frozen=True, slots=True)
class Step:
    """The outcome of one step.

    Example:
        >>> Step(applied=True, scale=2.0, next_scale=4.0).verdict.value
        'applied'
    """

    applied: Scalar  # bool []
    scale: Scalar  # float32 []: the scale that this step's loss was multiplied by
    next_scale: Scalar  # float32 []
    verdict: Verdict = Verdict.APPLIED
    norm: Scalar = None  # float32 []: unscaled; inf or NaN when skipped
    offenders: tuple[str, ...] = ()  # names of the parameters that went non-finite
