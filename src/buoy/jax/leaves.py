"""Leaves of trees: names by key path, dtypes, and checks of tree structures."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from buoy.jax.errors import IntegerLeafError, StructureError

__all__ = [
    "check_floats",
    "check_same",
    "difference",
    "dtype_of",
    "is_half",
    "is_narrow",
    "names_of",
    "real_of",
    "widen_fp16",
]

_SHOWN = 3  # names in a message before "and so many more"
_HALVES = (jnp.float16,)


def names_of(tree: Any) -> tuple[str, ...]:
    """Return the names of all leaves: their key paths.

    Example:
        >>> names_of({"layers": [{"w": 1.0}, {"w": 2.0}]})
        ('layers.0.w', 'layers.1.w')
    """
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    return tuple(_name(path) for path, _ in paths)


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".") or "(root)"


def dtype_of(leaf: Any) -> Any:
    """Return the dtype of an array, a tracer or a number; None for anything else."""
    try:
        return jax.dtypes.result_type(leaf)
    except (TypeError, ValueError):
        return None


def is_half(leaf: Any) -> bool:
    """Return whether a leaf is FP16, whose gradients cannot be unscaled in place."""
    return dtype_of(leaf) in _HALVES


def real_of(leaf: jax.Array) -> Any:
    """Return the dtype of a leaf; for a complex leaf, that of its parts."""
    return jnp.finfo(leaf.dtype).dtype  # type: ignore[no-untyped-call]


def is_narrow(leaf: jax.Array) -> bool:
    """Return whether a leaf's numbers have fewer than 32 bits."""
    return bool(real_of(leaf).itemsize < 4)


def widen_fp16(tree: Any) -> Any:
    """Cast FP16 leaves to float32; keep the others."""
    return jax.tree.map(
        lambda leaf: jnp.asarray(leaf, jnp.float32) if is_half(leaf) else leaf, tree
    )


def check_floats(tree: Any, what: str) -> None:
    """Raise for leaves that have no gradient: integers, booleans, strings."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        dtype = dtype_of(leaf)
        if dtype is not None and jnp.issubdtype(dtype, jnp.inexact):
            continue
        found = type(leaf).__name__ if dtype is None else str(dtype)
        message = (
            f"The {what} at `{_name(path)}` is {found}: only floating-point leaves "
            "have a gradient that can be unscaled. Keep it out of the parameters "
            "(a tree of its own, `equinox.partition`, `nnx.split(model, nnx.Param)`), "
            "or put None in its place."
        )
        raise IntegerLeafError(message)


def check_same(grads: optax.Updates, params: optax.Params) -> None:
    """Raise if gradients and parameters have different trees; name the difference."""
    shapes: list[Any] = [jax.tree.structure(tree) for tree in (grads, params)]
    if shapes[0] != shapes[1]:
        raise StructureError(difference(names_of(grads), names_of(params)))
    named = zip(
        names_of(grads), jax.tree.leaves(grads), jax.tree.leaves(params), strict=True
    )
    for name, grad, param in named:
        if jnp.shape(grad) != jnp.shape(param):
            message = (
                f"The gradient at `{name}` has shape {jnp.shape(grad)}, but its "
                f"parameter has shape {jnp.shape(param)}. They must be equal: were the "
                "gradients of several devices or micro-batches stacked instead of "
                "averaged?"
            )
            raise StructureError(message)


def difference(grads: tuple[str, ...], params: tuple[str, ...]) -> str:
    """Return a message that lists the leaves that only one tree has."""
    missing = [name for name in params if name not in grads]
    strange = [name for name in grads if name not in params]
    found = "The gradients and the parameters are different trees. "
    if missing:
        found += f"No gradient for {_listed(missing)}. "
    if strange:
        found += f"No parameter for {_listed(strange)}. "
    if not missing and not strange:
        found += "The leaves have the same names, but their containers differ. "
    return found + (
        "Pass what `buoy.jax.value_and_grad` returned for these parameters."
    )


def _listed(names: list[str]) -> str:
    more = len(names) - _SHOWN
    shown = ", ".join(f"`{name}`" for name in names[:_SHOWN])
    return f"{shown} and {more} more" if more > 0 else shown
