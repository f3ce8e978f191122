"""The rule's five functions on JAX arrays: eager, under jit, scan and vmap.

And the measurements of gradients for Keras; `buoy.jax` has its own, for shards.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from buoy._core.advance import Found
from buoy._core.errors import PolicyError
from buoy._core.formats import FLOAT32_MAX
from buoy._core.ops import Ops, Precision, Scalar
from buoy._core.policies.registry import CLASSES, state_class
from buoy._core.state import Seen
from buoy._core.step import BLOCK, SMALL, sample_stride

__all__ = [
    "MEASURE",
    "count_small",
    "lift",
    "look",
    "ops",
    "program_now",
    "register",
    "told",
    "values_of",
]


class _Jax:
    @staticmethod
    def where(condition: Scalar, if_true: Scalar, if_false: Scalar, /) -> Scalar:
        return jnp.where(condition, if_true, if_false)

    @staticmethod
    def log2(x: Scalar, /) -> Scalar:
        return jnp.log2(x)

    @staticmethod
    def exp2(x: Scalar, /) -> Scalar:
        # Not jnp.exp2: it is exp(x * log 2) and misses nine of ten powers of two.
        x = jnp.asarray(x)
        return jnp.power(jnp.asarray(2.0, x.dtype), x)

    @staticmethod
    def floor(x: Scalar, /) -> Scalar:
        return jnp.floor(x)

    @staticmethod
    def cast(x: Scalar, precision: Precision, /) -> Scalar:
        if precision == "float64":
            _need_x64()
        x = jnp.asarray(x)
        if x.dtype == jnp.float64 and precision == "float32":
            # XLA drops a conversion there and back, but never this.
            x = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=23)
        return x.astype(precision)


class _JaxWide(_Jax):
    """The same with float32 values held in float64.

    XLA flushes subnormal float32 numbers to zero; scalers without a floor get there.
    """

    @staticmethod
    def cast(x: Scalar, precision: Precision, /) -> Scalar:
        wide = _Jax.cast(x, "float64")
        if precision == "float64":
            return wide
        normal = jax.lax.reduce_precision(wide, exponent_bits=8, mantissa_bits=23)
        subnormal = jnp.round(wide * 2.0**149) * 2.0**-149
        return jnp.where(jnp.abs(wide) < 2.0**-126, subnormal, normal)


_JAX = _Jax()
_JAX_WIDE = _JaxWide()


def ops(*, wide: bool = False) -> Ops:
    """Give the five functions; the wide ones need x64, and states in float64."""
    return _JAX_WIDE if wide else _JAX


def lift(value: Scalar, precision: Precision = "float32") -> jax.Array:
    """Turn a plain number into an array of the width that states use."""
    if isinstance(value, bool):
        return jnp.asarray(value, jnp.bool_)
    if isinstance(value, int):
        return jnp.asarray(value, jnp.int32)
    if precision == "float64":
        _need_x64()
    return jnp.asarray(value, precision)


@cache
def register(kind: type[Any]) -> type[Any]:
    """Make a state class a pytree; its fields are listed by the dataclass itself."""
    return jax.tree_util.register_dataclass(
        kind, data_fields=[field.name for field in fields(kind)], meta_fields=[]
    )


for _policy in CLASSES.values():
    register(state_class(_policy))  # type: ignore[arg-type]
register(Seen)


def _need_x64() -> None:
    if jax.dtypes.canonicalize_dtype("float64") != jnp.float64:
        message = (
            "This policy computes its scale in float64, which JAX disables by "
            'default. Call `jax.config.update("jax_enable_x64", True)` first, or use '
            "a policy that computes in float32, e.g. 'headroom' or 'backoff'."
        )
        raise PolicyError(message)


def program_now() -> Any:
    """Return what is traced now; two calls in one trace return equal values."""
    from jax.extend.core import get_opaque_trace_state  # noqa: PLC0415 - here alone

    return get_opaque_trace_state()  # type: ignore[no-untyped-call]


def told(tell: Callable[[jax.Array], None], loss: jax.Array) -> jax.Array:
    """Return the loss; `tell` is called with its value outside of `jax.grad`.

    Inside a function that is differentiated the loss is a tracer, which may not leave
    it.  JAX calls `_forward` outside, with the value there.
    """
    if isinstance(loss, jax.core.Tracer):
        return _told(tell, loss)
    tell(loss)
    return loss


def _forward(tell: Callable[[jax.Array], None], loss: jax.Array) -> Any:
    tell(loss)
    return loss, None


def _backward(tell: Any, kept: None, grad: jax.Array) -> tuple[jax.Array]:
    del tell, kept
    return (grad,)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _told(tell: Callable[[jax.Array], None], loss: jax.Array) -> jax.Array:
    del tell
    return loss


_told.defvjp(_forward, _backward)


def values_of(grad: Any) -> jax.Array:
    """Return a gradient's values; of a sparse one those that are there."""
    values: jax.Array = grad.data if hasattr(grad, "todense") else grad
    return values


def look(grads: Sequence[Any], inverse: jax.Array) -> Found:
    """Check gradients and measure them; `inverse` is 1 / the scale that they carry."""
    wide = [values_of(grad).astype(jnp.float32) for grad in grads]
    sizes = jnp.stack([jnp.max(jnp.abs(grad), initial=0.0) for grad in wide])
    squares = jnp.stack([jnp.sum(grad * grad) for grad in wide])
    bad = jnp.logical_not(jnp.maximum(sizes, sizes * inverse) <= FLOAT32_MAX)
    bad |= jnp.isnan(squares)  # a maximum over shards drops NaN, a sum does not
    return Found(
        bad=bad,
        finite=jnp.logical_not(jnp.any(bad)),
        amax=jnp.max(sizes),
        norm=jnp.sqrt(jnp.sum(squares)),
    )


def count_small(
    grad: jax.Array, limit: jax.Array, stride: int
) -> tuple[jax.Array, jax.Array]:
    """Count a gradient's nonzero elements, those below `limit` and all; int32 [].

    In one pass, and as whole numbers: XLA would split sums of floats on a CPU.  Of a
    sample, see `sample_stride`; not by slices, which would move shards.
    """
    size = jnp.abs(grad)
    there = size != 0
    if stride > 1:
        place = jnp.zeros(grad.shape, jnp.uint32)
        for axis, length in enumerate(grad.shape):
            along = jax.lax.broadcasted_iota(jnp.uint32, grad.shape, axis)
            place = place * length + along
        there &= place % (BLOCK * stride) < BLOCK
    below = there & (size.astype(jnp.float32) < limit)
    zero = jnp.int32(0)
    every = tuple(range(grad.ndim))
    small, nonzero = jax.lax.reduce(
        (below.astype(jnp.int32), there.astype(jnp.int32)),
        (zero, zero),
        lambda x, y: (x[0] + y[0], x[1] + y[1]),
        every,
    )
    return small, nonzero


def _underflow(grads: Sequence[Any], lowered: jax.Array) -> jax.Array:
    """Return the share of the nonzero gradients that is small.  float32 []."""
    arrays = [values_of(grad) for grad in grads]
    stride = sample_stride(sum(map(jnp.size, arrays)))
    counts = [count_small(array, SMALL / lowered, stride) for array in arrays]
    totals: jax.Array = jnp.sum(jnp.asarray(counts), axis=0)
    return totals[0] / totals[1]


MEASURE = {"underflow": _underflow}  # besides "amax_log2", which `look` takes
