"""The five functions that a rule needs from whatever its numbers are.

A policy's rule is written once, with operators and these five.  Plain Python numbers
are the definition; the array backends (`buoy._backends`) must agree with it, bit for
bit.  They are found by the type of the number at hand, and imported only then: if
torch had not been imported, there could be no tensor to find.
"""

import math
import struct
from functools import lru_cache
from importlib import import_module
from typing import Any, Literal, Protocol

__all__ = ["PLAIN", "Ops", "Precision", "Scalar", "ops_of", "single"]

Scalar = Any  # float, int, bool, NumPy scalar, 0-d torch.Tensor, traced jax.Array
Precision = Literal["float32", "float64"]

_PACK, _UNPACK = struct.Struct("f").pack, struct.Struct("f").unpack


class Ops(Protocol):
    """What a backend brings.  Every function takes and returns scalars of its kind."""

    def where(self, condition: Scalar, if_true: Scalar, if_false: Scalar, /) -> Scalar:
        """Select without branching; both sides are evaluated."""

    def log2(self, x: Scalar, /) -> Scalar:
        """Binary logarithm: -inf for 0, NaN for negative numbers."""

    def exp2(self, x: Scalar, /) -> Scalar:
        """Power of two, exact wherever x is a whole number."""

    def floor(self, x: Scalar, /) -> Scalar:
        """Largest whole number not above x, as a float."""

    def cast(self, x: Scalar, precision: Precision, /) -> Scalar:
        """Round a float to float32, or widen it to float64."""


def single(x: float) -> float:
    """Round a Python float to the nearest float32, as every backend does.

    Example:
        >>> single(0.1)
        0.10000000149011612
        >>> single(1e39)
        inf
    """
    try:
        rounded: float = _UNPACK(_PACK(x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)
    return rounded


class _Plain:
    """The five functions on Python numbers: the definition of all the others."""

    @staticmethod
    def where(condition: Scalar, if_true: Scalar, if_false: Scalar, /) -> Scalar:
        return if_true if condition else if_false

    @staticmethod
    def log2(x: Scalar, /) -> Scalar:
        if x > 0:
            return math.log2(x)
        return -math.inf if x == 0 else math.nan

    @staticmethod
    def exp2(x: Scalar, /) -> Scalar:
        try:
            return 2.0**x
        except OverflowError:
            return math.inf

    @staticmethod
    def floor(x: Scalar, /) -> Scalar:
        return float(math.floor(x)) if math.isfinite(x) else x

    @staticmethod
    def cast(x: Scalar, precision: Precision, /) -> Scalar:
        return single(x) if precision == "float32" else float(x)


PLAIN: Ops = _Plain()

_BACKEND_OF = {"numpy": "numpy", "torch": "torch", "jax": "jax", "jaxlib": "jax"}


def ops_of(*values: Scalar) -> Ops:
    """Find the functions for these numbers: the first that is not plain decides.

    Example:
        >>> ops_of(1.0, True) is PLAIN
        True
    """
    for value in values:
        ops = _ops_of_type(type(value))  # type: ignore[arg-type]
        if ops is not PLAIN:
            return ops
    return PLAIN


@lru_cache(maxsize=64)
def _ops_of_type(kind: "type[Any]") -> Ops:
    if kind in (float, int, bool, type(None)):
        return PLAIN
    for base in kind.__mro__:
        name = _BACKEND_OF.get(base.__module__.partition(".")[0])
        if name:
            found: Ops = import_module(f"buoy._backends.{name}").ops()
            return found
    return PLAIN
