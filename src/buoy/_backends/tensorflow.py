"""The rule's five functions on TensorFlow tensors, and measurements of gradients.

They work eagerly, in graphs and under XLA.

TensorFlow flushes subnormal numbers to zero, and its logarithms and powers differ from
Python's in the last bits.  The functions here are exact where a policy in float32 needs
it; a policy whose state is in float64 is refused.
"""

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from buoy._core.advance import Found
from buoy._core.errors import PolicyError
from buoy._core.formats import FLOAT32_MAX, FLOAT32_TINY
from buoy._core.ops import PLAIN, Ops, Precision, Scalar, register_ops
from buoy._core.step import BLOCK, SMALL, sample_stride

__all__ = [
    "MEASURE",
    "check_precision",
    "lift",
    "look",
    "ops",
    "program_now",
    "values_of",
]

# Of float32: the bias of its exponent, its fraction bits, its normal exponents.
_BIAS = 127
_MANTISSA = 23
_LOWEST = -126.0
_HIGHEST = 128.0
_LN2 = math.log(2.0)


class _TensorFlow:
    @staticmethod
    def where(condition: Scalar, if_true: Scalar, if_false: Scalar, /) -> Scalar:
        if not tf.is_tensor(condition):
            return if_true if condition else if_false
        # TensorFlow promotes nothing: a plain number takes the other side's dtype.
        if tf.is_tensor(if_true):
            if_false = tf.convert_to_tensor(if_false, if_true.dtype)
        elif tf.is_tensor(if_false):
            if_true = tf.convert_to_tensor(if_true, if_false.dtype)
        return tf.where(condition, if_true, if_false)

    @staticmethod
    def log2(x: Scalar, /) -> Scalar:
        if not tf.is_tensor(x):
            return PLAIN.log2(x)
        bits = tf.bitcast(x, tf.int32)
        exponent = tf.bitwise.right_shift(bits, _MANTISSA) - _BIAS
        fraction = tf.bitcast(
            tf.bitwise.bitwise_and(bits, 2**_MANTISSA - 1) + (_BIAS << _MANTISSA),
            tf.float32,
        )
        exact = tf.cast(exponent, tf.float32) + tf.math.log(fraction) / _LN2
        normal = tf.where(tf.abs(x) < FLOAT32_TINY, 0.0, x)
        return tf.where((normal > 0.0) & (x < math.inf), exact, tf.math.log(normal))

    @staticmethod
    def exp2(x: Scalar, /) -> Scalar:
        if not tf.is_tensor(x):
            return PLAIN.exp2(x)
        whole = tf.floor(x)
        inside = tf.clip_by_value(whole, _LOWEST, _HIGHEST)  # 128 gives inf
        bits = tf.bitwise.left_shift(tf.cast(inside, tf.int32) + _BIAS, _MANTISSA)
        power = tf.where(whole < _LOWEST, 0.0, tf.bitcast(bits, tf.float32))
        fraction = tf.where(x > whole, x - whole, 0.0)
        return tf.where(tf.math.is_nan(x), x, power * tf.exp(fraction * _LN2))

    @staticmethod
    def floor(x: Scalar, /) -> Scalar:
        return tf.floor(x) if tf.is_tensor(x) else PLAIN.floor(x)

    @staticmethod
    def cast(x: Scalar, precision: Precision, /) -> Scalar:
        return tf.cast(x, precision) if tf.is_tensor(x) else PLAIN.cast(x, precision)


_TENSORFLOW = _TensorFlow()
register_ops(tf.Tensor, _TENSORFLOW)


def ops() -> Ops:
    """Return the five functions for TensorFlow tensors."""
    return _TENSORFLOW


def lift(value: Scalar, precision: Precision = "float32") -> tf.Tensor:
    """Turn a plain number into a tensor of the width that states use."""
    if isinstance(value, bool):
        return tf.constant(value, tf.bool)
    if isinstance(value, int):
        return tf.constant(value, tf.int32)
    check_precision(precision)
    return tf.constant(value, precision)


def check_precision(precision: Precision) -> None:
    """Raise for a policy whose state is in float64."""
    if precision != "float32":
        message = (
            "This policy keeps its scale in float64, in which TensorFlow's logarithms "
            "and powers differ from Python's in the last bits. Use a policy in "
            "float32, e.g. 'headroom', 'backoff' or 'keras', or Keras on torch."
        )
        raise PolicyError(message)


def program_now() -> Any:
    """Return the graph that is traced now; None while TensorFlow runs eagerly."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def values_of(grad: Any) -> tf.Tensor:
    """Return a gradient's values; of `tf.IndexedSlices` those that are there."""
    return grad.values if isinstance(grad, tf.IndexedSlices) else grad


def look(grads: Sequence[Any], inverse: tf.Tensor, parts: int = 1) -> Found:
    """Check gradients and measure them; `inverse` is 1 / the scale that they carry.

    `parts` is the number of replicas that add up their unscaled gradients.
    """
    wide = [tf.cast(values_of(grad), tf.float32) for grad in grads]
    sizes = tf.stack([_largest(grad) for grad in wide])
    squares = tf.stack([tf.reduce_sum(grad * grad) for grad in wide])
    after = tf.maximum(sizes, sizes * (inverse * parts))
    # A maximum may ignore NaN, a sum of squares cannot.
    bad = tf.logical_not(after <= FLOAT32_MAX) | tf.math.is_nan(squares)
    return Found(
        bad=bad,
        finite=tf.logical_not(tf.reduce_any(bad)),
        amax=tf.reduce_max(sizes),
        norm=tf.sqrt(tf.reduce_sum(squares)),
    )


def _largest(grad: tf.Tensor) -> tf.Tensor:
    return tf.maximum(tf.reduce_max(tf.abs(grad)), 0.0)  # of nothing: 0


def _underflow(grads: Sequence[Any], lowered: tf.Tensor) -> tf.Tensor:
    """Return the share of the nonzero gradients that is small.  float32 []."""
    small = nonzero = tf.constant(0.0)
    values = [values_of(grad) for grad in grads]
    stride = sample_stride(sum(v.shape.num_elements() or 0 for v in values))
    for value in values:
        size = tf.abs(tf.cast(tf.reshape(value, [-1]), tf.float32))
        there = size > 0.0
        if stride > 1:
            there &= tf.range(tf.size(size)) % (BLOCK * stride) < BLOCK
        below = there & (size < SMALL / lowered)
        small += tf.reduce_sum(tf.cast(below, tf.float32))
        nonzero += tf.reduce_sum(tf.cast(there, tf.float32))
    return small / nonzero


MEASURE = {"underflow": _underflow}  # besides "amax_log2", which `look` takes
