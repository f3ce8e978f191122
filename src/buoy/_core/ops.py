"""The five functions of a policy's rule, for each kind of number.

A rule is written once, with operators and these five.  Plain Python numbers are the
definition; the array backends (`buoy._backends`) must agree bit for bit.  A backend is
found by the type of a number, and imported only then: without torch imported, there
can be no tensor.
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
    "ops_of",
    "register_backends",
    "register_ops",
    "single",
]

Scalar = Any  # a number: of Python or NumPy, a 0-d tensor, a traced array
Precision = Literal["float32", "float64"]

_PACK = struct.Struct("f").pack
_UNPACK = struct.Struct("f").unpack


class Ops(Protocol):
    """The functions of a backend.  Each takes and returns scalars of its kind."""

    def where(self, condition: Scalar, if_true: Scalar, if_false: Scalar, /) -> Scalar:
        """Select without a branch; both sides are evaluated."""

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
    rounded: float = _UNPACK(_PACK(x))[0]
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

_BACKEND_OF = {name: name for name in ("numpy", "torch", "jax", "tensorflow")}
_BACKEND_OF["jaxlib"] = "jax"
_KNOWN: dict[Any, Ops] = {float: PLAIN, int: PLAIN, bool: PLAIN, type(None): PLAIN}
_LOOKED_FOR: set[str] = set()


def ops_of(*values: Scalar) -> Ops:
    """Return the functions for these numbers, by the first that is not plain.

    A class may define its functions as `__buoy_ops__`.

    Example:
        >>> ops_of(1.0, True) is PLAIN
        True
    """
    for value in values:
        ops = _KNOWN.get(type(value))
        if ops is None:
            ops = _find_ops(type(value))
        if ops is not PLAIN:
            return ops
    return PLAIN


def register_ops(kind: type[Any], ops: Ops) -> None:
    """Register the functions of a type, so that a compiler need not search."""
    _KNOWN[kind] = ops


def register_backends() -> None:
    """Register the frameworks that are imported, before anything is traced."""
    for name in ("numpy", "torch", "jax", "tensorflow"):
        if name in sys.modules and name not in _LOOKED_FOR:
            _LOOKED_FOR.add(name)
            import_module(f"buoy._backends.{name}")


def _find_ops(kind: type[Any]) -> Ops:
    found: Ops | None = getattr(kind, "__buoy_ops__", None)
    for base in kind.__mro__:
        name = _BACKEND_OF.get(base.__module__.partition(".")[0])
        if name and found is None:
            found = import_module(f"buoy._backends.{name}").ops()
    register_ops(kind, PLAIN if found is None else found)
    return _KNOWN[kind]
