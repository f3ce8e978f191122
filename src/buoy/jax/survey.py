"""Check the gradients and measure their norm in one pass.

The sum of squares is the check: on a CPU it is the cheapest pass, and yields the norm.
If it is not finite, a second pass distinguishes an overflowing sum from an overflowing
gradient.  No decision depends on how a maximum treats NaN.
"""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from buoy._backends.jax import count_small
from buoy._core.formats import FLOAT32_MAX
from buoy._core.step import MEASUREMENTS, SMALL, bounded_norm, sample_stride
from buoy.jax.agree import devices_of, furthest, largest, total
from buoy.jax.leaves import is_narrow, real_of

__all__ = ["Survey", "agreed", "measure", "survey"]


class Survey(NamedTuple):
    """The findings about the scaled gradients, and their loss."""

    bad: jax.Array  # bool [leaves]: not finite, or not once unscaled
    norm: jax.Array  # float32 []
    amax: jax.Array | None  # float32 []: the largest magnitude; 0 if not due
    measured: dict[str, jax.Array]  # float32 [], by `MEASUREMENTS`; NaN if not due
    loss: jax.Array | None = None  # float32 []: before scaling, if it is known


def survey(
    leaves: Sequence[Any],
    inverse: jax.Array,
    *,
    amax: bool | jax.Array,
    branch: bool,
) -> Survey:
    """Read every gradient once; `inverse` is 1 / scale.

    `amax`: whether the largest magnitude is due.  With `branch`, this and the
    second pass run only if they are needed.
    """
    if not leaves:
        zero = jnp.zeros((), jnp.float32)
        size = None if amax is False else zero
        return Survey(jnp.zeros((0,), jnp.bool_), zero, size, {})
    squares = [total(_squares(leaf)) for leaf in leaves]
    norm = jnp.sqrt(sum(squares[1:], start=squares[0]))
    if branch:
        bad, norm = jax.lax.cond(
            jnp.isfinite(norm * inverse),
            _from_norm,
            _from_elements,
            leaves,
            norm,
            inverse,
        )
        top = None if amax is False else jax.lax.cond(amax, _top_of, _no_top, leaves)
    else:
        sizes = [_largest(leaf) for leaf in leaves]
        bad = _overflows(sizes, inverse)
        top = _top(sizes)
        # The norm is that of all devices; `agreed` takes the largest of their bounds.
        count = sum(jnp.size(leaf) * devices_of(leaf) for leaf in leaves)
        bound = bounded_norm(top, count)
        norm = jnp.where(jnp.isfinite(norm), norm, bound)
    return Survey(bad, norm, None if amax is False else top, {})


def _squares(leaf: jax.Array) -> jax.Array:
    wide = _wide(leaf)
    return jnp.sum(jnp.real(wide * jnp.conj(wide))).astype(jnp.float32)


def _largest(leaf: jax.Array) -> jax.Array:
    # The largest magnitude.  NaN counts as inf: over the shards of an array, XLA's
    # maximum drops NaN.
    size = jnp.abs(leaf)
    size = jnp.where(jnp.isnan(size), jnp.inf, size)
    return jnp.max(size, initial=0).astype(jnp.float32)


def _wide(leaf: jax.Array) -> jax.Array:
    return leaf.astype(jnp.float32) if is_narrow(leaf) else leaf


def _top(sizes: list[jax.Array]) -> jax.Array:
    return jnp.max(jnp.stack(sizes))


def _top_of(leaves: Sequence[Any]) -> jax.Array:
    return _top([_largest(leaf) for leaf in leaves])


def _no_top(leaves: Sequence[Any]) -> jax.Array:
    del leaves
    return jnp.zeros((), jnp.float32)


def _overflows(sizes: list[jax.Array], inverse: jax.Array) -> jax.Array:
    before = jnp.stack(sizes)
    fits = (before <= FLOAT32_MAX) & (before * inverse <= FLOAT32_MAX)
    return jnp.logical_not(fits)


def _from_norm(
    leaves: Sequence[Any], norm: jax.Array, inverse: jax.Array
) -> tuple[jax.Array, jax.Array]:
    del inverse
    return jnp.zeros((len(leaves),), jnp.bool_), norm


def _from_elements(
    leaves: Sequence[Any], norm: jax.Array, inverse: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return which leaves are not finite, and the norm without squaring overflow."""
    sizes = [_largest(leaf) for leaf in leaves]
    bad = _overflows(sizes, inverse)
    top = _top(sizes)
    unit = jnp.where(top > 0, top, 1.0)
    parts = [
        _squares(_wide(leaf) / unit.astype(real_of(_wide(leaf)))) for leaf in leaves
    ]
    exact = unit * jnp.sqrt(sum(parts[1:], start=parts[0]))
    return bad, jnp.where(jnp.any(bad), norm, exact)


def measure(
    leaves: Sequence[Any],
    lowered: jax.Array,
    steps: jax.Array,
    wants: frozenset[str],
    *,
    branch: bool,
) -> dict[str, jax.Array]:
    """Measure what the policy requests besides the largest gradient; NaN if not due.

    `lowered` is the scale of the backward pass / the scale that the gradients carry.
    """
    nothing = jnp.full((), jnp.nan, jnp.float32)
    found: dict[str, jax.Array] = {}
    for name, function in MEASURE.items():
        if name not in wants:
            continue
        due = MEASUREMENTS[name].due(steps)
        if branch:
            found[name] = jax.lax.cond(
                due, function, lambda *_: nothing, leaves, lowered
            )
        else:
            found[name] = jnp.where(due, function(leaves, lowered), nothing)
    return found


def _underflow(leaves: Sequence[Any], lowered: jax.Array) -> jax.Array:
    """Return the share of the nonzero gradients that is small.  float32 []."""
    stride = sample_stride(sum(map(jnp.size, leaves)))
    limit = SMALL / lowered
    small = nonzero = jnp.zeros((), jnp.int32)
    for leaf in leaves:
        below, there = count_small(leaf, limit, stride)
        small = small + total(below)
        nonzero = nonzero + total(there)
    return small / nonzero


MEASURE = {"underflow": _underflow}  # besides "amax_log2", which `survey` takes


def agreed(seen: Survey, axes: tuple[Hashable, ...] | None) -> Survey:
    """Combine the findings of all devices, in one collective."""
    if not axes:
        return seen
    sizes = [] if seen.amax is None else [seen.amax]
    losses = [] if seen.loss is None else [seen.loss, -seen.loss]
    numbers = [seen.bad, seen.norm, *losses, *sizes, *seen.measured.values()]
    bad, norm, *rest = largest(numbers, axes)
    loss = furthest(rest.pop(0), rest.pop(0)) if losses else None
    amax = rest.pop(0) if sizes else None
    values = [jnp.where(jnp.isfinite(x), x, jnp.nan) for x in rest]  # sent as inf
    measured = dict(zip(seen.measured, values, strict=True))
    return Survey(bad > 0, norm, amax, measured, loss)
