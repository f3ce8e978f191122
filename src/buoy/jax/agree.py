"""Make all devices decide alike where JAX does not ensure it.

Under `jit` arrays are global and no communication is needed.  Inside `shard_map` and
`pmap` each device has its own part: `axis_name` names the axes to reduce over.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from buoy.jax.errors import MissingAxisError, OptionError, UnboundAxisError

__all__ = [
    "axes_of",
    "check_axes",
    "devices_of",
    "furthest",
    "largest",
    "may_branch",
    "total",
    "varying",
]


def axes_of(axis_name: object) -> tuple[Hashable, ...] | None:
    """Return `axis_name` as a tuple; None if it was not given."""
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
    """Return the manual mesh axes in the current context."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def may_branch(leaves: Sequence[Any]) -> bool:
    """Return whether a compiled program should branch in the current context.

    On a CPU it should: one side of the branch is not computed.  Not on accelerators,
    where a branch waits for the host; not with manual axes, where devices might take
    different branches; not on a mesh with explicit axes, where both branches must have
    the same sharding; and not outside of `jit`, where every call would compile.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.manual_axes or mesh.explicit_axes or jax.default_backend() != "cpu":
        return False
    return any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)


def varying(value: Any) -> tuple[str, ...]:
    """Return the axes over which a value may vary, as far as JAX tracks them."""
    kind = jax.typeof(value)
    now = getattr(getattr(kind, "mat", None), "varying", ())
    return tuple(sorted(getattr(kind, "vma", now)))  # `vma` before 0.10


def check_axes(
    values: dict[str, Any], axes: tuple[Hashable, ...] | None, what: str
) -> None:
    """Raise if devices would decide independently; `values` are checked by name."""
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
        "would skip a step that another applies, and their scales would differ from "
        f"then on. Pass `axis_name={shown}` to `loss_scaled`, so that the devices "
        "decide together; or `axis_name=()` if each device trains its own model."
    )


def _tracked(manual: tuple[str, ...]) -> bool:
    """Return whether JAX tracks varying values here (`check_vma=True`)."""
    return bool(varying(jax.lax.axis_index(manual[0])))


def _check_bound(axes: tuple[Hashable, ...]) -> None:
    for axis in axes:
        try:
            jax.lax.axis_index(axis)
        except NameError as error:
            message = (
                f"`axis_name={axis!r}` was given to `loss_scaled`, but there is no "
                "such axis here. Call it inside `shard_map`, `pmap` or `vmap` over "
                "that axis. Under plain `jit`, leave `axis_name` out: arrays are "
                "global."
            )
            raise UnboundAxisError(message) from error


def total(value: jax.Array) -> jax.Array:
    """Sum over the axes on which a value varies."""
    over = varying(value)
    if not over:
        return value
    added: jax.Array = jax.lax.psum(value, over)  # type: ignore[no-untyped-call]
    return added


def devices_of(value: jax.Array) -> int:
    """Return the number of devices over which `total` sums a value."""
    count: int = jax.lax.psum(1, varying(value))  # type: ignore[no-untyped-call]
    return count


def largest(values: list[jax.Array], axes: tuple[Hashable, ...]) -> list[jax.Array]:
    """Return the maximum of each number over all devices, in one collective.

    NaN becomes inf: both mean "not finite", and not every collective keeps NaN.
    """
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


def furthest(highest: jax.Array, highest_negated: jax.Array) -> jax.Array:
    """Return the number that is furthest from 0 on any device; inf for NaN.

    The arguments are what `largest` returns for the number and for its negative.
    """
    return jnp.where(highest >= highest_negated, highest, -highest_negated)
