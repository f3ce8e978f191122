"""Cast trees: the dtypes of parameters, computation and outputs."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from buoy.jax.errors import OptionError

__all__ = ["Dtypes", "cast"]


def cast(tree: Any, dtype: Any) -> Any:
    """Cast the floating-point arrays of a tree; keep everything else.

    Integers, booleans, random keys, complex numbers, Python numbers, strings and None
    do not change; neither do arrays that already have the dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> held = cast({"w": jnp.ones(2), "n": jnp.array(3), "b": None}, "float16")
        >>> held["w"].dtype, held["n"].dtype, held["b"]
        (dtype('float16'), dtype('int32'), None)
    """
    wanted = _floating(dtype)

    def one(leaf: Any) -> Any:
        held = getattr(leaf, "dtype", None)
        if held is None or held == wanted or not jnp.issubdtype(held, jnp.floating):
            return leaf
        return leaf.astype(wanted)

    return jax.tree.map(one, tree)


@dataclass(frozen=True, slots=True)
class Dtypes:
    """The dtypes of parameters, of the computation and of its output.

    Example:
        >>> import jax.numpy as jnp
        >>> half = Dtypes(compute="float16")
        >>> @half.computed
        ... def apply(w, x):
        ...     print(w.dtype, x.dtype)
        ...     return w @ x
        >>> apply(jnp.ones((2, 2)), jnp.ones(2)).dtype
        float16 float16
        dtype('float32')
    """

    param: Any = "float32"
    compute: Any = "float16"
    output: Any = "float32"

    def __post_init__(self) -> None:
        for name in ("param", "compute", "output"):
            object.__setattr__(self, name, _floating(getattr(self, name)).name)

    def to_param(self, tree: Any) -> Any:
        """Cast to the dtype of parameters."""
        return cast(tree, self.param)

    def to_compute(self, tree: Any) -> Any:
        """Cast to the dtype of the computation."""
        return cast(tree, self.compute)

    def to_output(self, tree: Any) -> Any:
        """Cast to the dtype of outputs."""
        return cast(tree, self.output)

    def computed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function: cast its arguments to `compute`, its result to `output`."""

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self.to_compute((args, kwargs))
            return self.to_output(function(*args, **kwargs))

        return wrapped


def _floating(dtype: Any) -> Any:
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        message = (
            "A floating-point dtype such as 'float16', 'bfloat16' or 'float32' is "
            f"needed, got {dtype!r}."
        )
        raise OptionError(message)
    return found
