"""The rule's five functions on NumPy scalars."""

from collections.abc import Callable

import numpy as np

from buoy._core.ops import PLAIN, Ops, Precision, Scalar, register_ops

__all__ = ["lift", "ops"]


class _NumPy:
    @staticmethod
    def where(condition: Scalar, if_true: Scalar, if_false: Scalar, /) -> Scalar:
        return np.asarray(np.where(condition, if_true, if_false))[()]

    @staticmethod
    def log2(x: Scalar, /) -> Scalar:
        if np.asarray(x).dtype == np.float64:
            return _exactly(PLAIN.log2, x)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.log2(x)

    @staticmethod
    def exp2(x: Scalar, /) -> Scalar:
        kind = np.asarray(x).dtype
        if kind == np.float64:
            return _exactly(PLAIN.exp2, x)
        return np.power(np.asarray(2.0, kind), x)[()]

    @staticmethod
    def floor(x: Scalar, /) -> Scalar:
        return np.floor(x)

    @staticmethod
    def cast(x: Scalar, precision: Precision, /) -> Scalar:
        with np.errstate(over="ignore"):
            return np.asarray(x).astype(precision)[()]


def _exactly(function: Callable[[Scalar], Scalar], x: Scalar) -> Scalar:
    """Apply the definition: the last bit of NumPy's own hangs on the CPU it finds."""
    each = np.vectorize(lambda number: function(float(number)), otypes=[np.float64])
    return each(x)[()]


_NUMPY = _NumPy()
for _kind in (np.bool_, np.int32, np.int64, np.float32, np.float64, np.ndarray):
    register_ops(_kind, _NUMPY)


def ops() -> Ops:
    """Give the five functions."""
    return _NUMPY


def lift(value: Scalar, precision: Precision = "float32") -> Scalar:
    """Turn a plain number into a NumPy scalar of the width that states use."""
    if isinstance(value, bool):
        return np.bool_(value)
    if isinstance(value, int):
        return np.int32(value)
    return np.asarray(value, precision)[()]
