"""The five functions that a rule needs from whatever its numbers are.

A policy's rule is written once, with operators and these five.  Plain Python numbers
are the definition; the array backends (`buoy._backends`) must agree with it, bit for
bit.  They are found by the type of the number at hand, and imported only then: if
torch had not been imported, there could be no tensor to find.
"""

import math
import struct
import sys
from importlib import import_module
from typing import Any, Literal, Protocol

__all__ = [
    "PLAIN",
    "Ops",
    "Precision",
    "Scalar",
    "know",
    "know_backends",
    "ops_of",
    "single",
]

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
        return x // 1.0 if -math.inf < x < math.inf else x

    @staticmethod
    def cast(x: Scalar, precision: Precision, /) -> Scalar:
        return single(x) if precision == "float32" else float(x)


PLAIN: Ops = _Plain()

_BACKEND_OF = {"numpy": "numpy", "torch": "torch", "jax": "jax", "jaxlib": "jax"}
_KNOWN: dict[Any, Ops] = {float: PLAIN, int: PLAIN, bool: PLAIN, type(None): PLAIN}
_LOOKED_FOR: set[str] = set()


def ops_of(*values: Scalar) -> Ops:
    """Find the functions for these numbers: the first that is not plain decides.

    A type of your own may bring its functions as `__buoy_ops__`.

    Example:
        >>> ops_of(1.0, True) is PLAIN
        True
    """
    for value in values:
        ops = _KNOWN.get(type(value))
        if ops is None:
            ops = _learn(type(value))
        if ops is not PLAIN:
            return ops
    return PLAIN


def know(kind: type[Any], ops: Ops) -> None:
    """Remember whose functions a type takes, so that a compiler need not look."""
    _KNOWN[kind] = ops


def know_backends() -> None:
    """Meet the frameworks that are imported already, before anything is traced."""
    for name in ("numpy", "torch", "jax"):
        if name in sys.modules and name not in _LOOKED_FOR:
            _LOOKED_FOR.add(name)
            import_module(f"buoy._backends.{name}")


def _learn(kind: type[Any]) -> Ops:
    found: Ops | None = getattr(kind, "__buoy_ops__", None)
    for base in kind.__mro__:
        name = _BACKEND_OF.get(base.__module__.partition(".")[0])
        if name and found is None:
            found = import_module(f"buoy._backends.{name}").ops()
    know(kind, PLAIN if found is None else found)
    return _KNOWN[kind]
