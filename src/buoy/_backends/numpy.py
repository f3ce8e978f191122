"""The rule's five functions on NumPy scalars."""

import numpy as np

from buoy._core.ops import Ops, Precision, Scalar, know

__all__ = ["lift", "ops"]


class _NumPy:
    @staticmethod
    def where(condition: Scalar, if_true: Scalar, if_false: Scalar, /) -> Scalar:
        return np.asarray(np.where(condition, if_true, if_false))[()]

    @staticmethod
    def log2(x: Scalar, /) -> Scalar:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.log2(x)

    @staticmethod
    def exp2(x: Scalar, /) -> Scalar:
        return np.power(np.asarray(2.0, np.asarray(x).dtype), x)[()]

    @staticmethod
    def floor(x: Scalar, /) -> Scalar:
        return np.floor(x)

    @staticmethod
    def cast(x: Scalar, precision: Precision, /) -> Scalar:
        with np.errstate(over="ignore"):
            return np.asarray(x).astype(precision)[()]


_NUMPY = _NumPy()
for _kind in (np.bool_, np.int32, np.int64, np.float32, np.float64, np.ndarray):
    know(_kind, _NUMPY)


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
