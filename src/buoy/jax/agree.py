"""Make every device see the same, where JAX does not by itself.

Under `jit` arrays are global and nothing is to be done.  Inside `shard_map` and `pmap`
each device sees its own part: `axis_name` says over which axes to agree.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from buoy.jax.errors import MissingAxisError, OptionError, UnboundAxisError

__all__ = ["axes_of", "check_axes", "largest", "may_branch", "total", "varying"]


def axes_of(axis_name: Any) -> tuple[Any, ...] | None:
    """Turn `axis_name` into a tuple; None stays None: not said."""
    if axis_name is None:
        return None
    axes = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    for axis in axes:
        if not isinstance(axis, str):
            message = (
                f"`axis_name` must be the name of a mesh axis or several, got {axis!r}."
            )
            raise OptionError(message)
    return axes


def _manual_axes() -> tuple[str, ...]:
    """Name the mesh axes over which each device sees its own part, here and now."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def may_branch(leaves: Sequence[Any]) -> bool:
    """Say whether a compiled program should branch, here and now.

    A CPU may: on most steps one side of the branch is never computed.  Accelerators
    would have to ask the host which way to go; devices that see different parts might
    go different ways; branches on a mesh with explicit axes must agree in where their
    results lie; and outside of `jit` a branch is compiled at every call.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.manual_axes or mesh.explicit_axes or jax.default_backend() != "cpu":
        return False
    return any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)


def varying(value: Any) -> tuple[str, ...]:
    """Name the axes over which a value may differ, as far as JAX keeps account."""
    kind = jax.typeof(value)
    now = getattr(getattr(kind, "mat", None), "varying", ())
    return tuple(sorted(getattr(kind, "vma", now)))  # `vma` before 0.10


def check_axes(values: dict[str, Any], axes: tuple[Any, ...] | None, what: str) -> None:
    """Refuse to let devices decide apart; `values` are the named things looked at."""
    if axes:
        _check_bound(axes)
    manual = _manual_axes()
    if axes is not None or not manual or not values:
        return
    for name, value in values.items():
        over = varying(value)
        if over:
            raise MissingAxisError(_missing(f"The {what} `{name}` differs", over))
    if not _tracked(manual):
        first = next(iter(values))
        raise MissingAxisError(_missing(f"The {what} `{first}` may differ", manual))


def _missing(found: str, over: tuple[str, ...]) -> str:
    shown = repr(over[0]) if len(over) == 1 else repr(over)
    return (
        f"{found} between the devices of mesh axis {', '.join(map(repr, over))}: one "
        "would skip a step that another applies, and their scales would part for good. "
        f"Pass `axis_name={shown}` to `loss_scaled`, so that they agree; or "
        "`axis_name=()` if each device trains a model of its own."
    )


def _tracked(manual: tuple[str, ...]) -> bool:
    """Say whether JAX keeps account of what varies here (`check_vma=True`)."""
    return bool(varying(jax.lax.axis_index(manual[0])))


def _check_bound(axes: tuple[Any, ...]) -> None:
    for axis in axes:
        try:
            jax.lax.axis_index(axis)
        except NameError as error:
            message = (
                f"`axis_name={axis!r}` was given to `loss_scaled`, and no such axis "
                "exists here. Call it inside `shard_map`, `pmap` or `vmap` over that "
                "axis; under plain `jit` leave `axis_name` out: arrays are global."
            )
            raise UnboundAxisError(message) from error


def total(value: jax.Array) -> jax.Array:
    """Add up over the axes on which a value is known to vary."""
    over = varying(value)
    if not over:
        return value
    added: jax.Array = jax.lax.psum(value, over)  # type: ignore[no-untyped-call]
    return added


def largest(values: list[jax.Array], axes: tuple[Any, ...] | None) -> list[jax.Array]:
    """Take the largest of each number over all devices, in one collective.

    NaN becomes inf: both say "not finite", and not every collective keeps NaN.
    """
    if not axes:
        return values
    flat = [jnp.atleast_1d(value).astype(jnp.float32) for value in values]
    sizes = [part.size for part in flat]
    packed = jnp.concatenate(flat)
    packed = jnp.where(jnp.isnan(packed), jnp.inf, packed)
    packed = jax.lax.pmax(packed, axes)  # type: ignore[no-untyped-call]
    parts = jnp.split(packed, [sum(sizes[:i]) for i in range(1, len(sizes))])
    return [
        part.reshape(jnp.shape(value))
        for part, value in zip(parts, values, strict=True)
    ]
