"""The rule's five functions on JAX arrays: eager, under jit, scan and vmap."""

from dataclasses import fields
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from buoy._core.errors import PolicyError
from buoy._core.ops import Ops, Precision, Scalar
from buoy._core.policies.registry import CLASSES
from buoy._core.state import Seen

__all__ = ["lift", "ops", "register"]


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


for _kind in {cls.init.__annotations__["return"]: None for cls in CLASSES.values()}:
    register(_kind)
register(Seen)


def _need_x64() -> None:
    if jax.dtypes.canonicalize_dtype("float64") != jnp.float64:
        message = (
            "This policy computes its scale in float64, which JAX has switched off. "
            'Call `jax.config.update("jax_enable_x64", True)` first, or take a policy '
            "with `arithmetic='single'`, e.g. 'backoff' or 'headroom'."
        )
        raise PolicyError(message)
