"""Warn where other transformations get scaled gradients: `loss_scaled` is not outside.

The structure of the optimizer's state shows what stands around `loss_scaled`, and what
stands before it in a chain.  It does not show what a transformation computes: those of
`optax.clip_by_global_norm` and of `optax.identity` have the same empty state.  Every
one before `loss_scaled` is reported, because all of them can stand inside.
"""

from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax
import optax

from buoy._core.warn import warn

__all__ = ["warn_of_nesting"]

_MULTI_STEPS = (
    "`optax.MultiSteps` wraps `loss_scaled`: it adds up scaled gradients, and after "
    "one overflow its sum stays NaN (it clears the sum by multiplying by 0). Put it "
    "inside: `loss_scaled(optax.MultiSteps(inner, k))` checks every micro-batch and "
    "leaves out only the bad ones."
)
_APPLY_IF_FINITE = (
    "`optax.apply_if_finite` wraps `loss_scaled`: it hides overflows, so the scale "
    "does not fall and every later step overflows too. Remove it: `loss_scaled` "
    "applies only finite updates."
)
_MASKED = (
    "`optax.masked` wraps `loss_scaled`: gradients outside of the mask are not divided "
    "by the scale, and become updates that are thousands of times too large. Put the "
    "mask inside: `loss_scaled(optax.masked(inner, mask))`. To freeze the other "
    'parameters: `loss_scaled(optax.partition({"train": inner, "freeze": '
    "optax.set_to_zero()}, labels))`."
)
_CONDITIONAL = (
    "`optax.conditionally_transform` wraps `loss_scaled`: in the steps that it leaves "
    "out, gradients are not divided by the scale, and become updates that are "
    "thousands of times too large. Put it inside: "
    "`loss_scaled(optax.conditionally_transform(inner, condition))`."
)
_PARTITION = (
    "`optax.partition` (`optax.multi_transform`) wraps `loss_scaled`, which unscales "
    "only the gradients of its own label: those of {others} stay multiplied by the "
    "scale. Wrap the whole partition: `loss_scaled(optax.partition(transforms, "
    "labels))`."
)
_CHAIN = (
    "`loss_scaled` is number {place} in {chain}: what stands before it gets gradients "
    "that are still multiplied by the scale. Clipping there limits the scaled "
    "gradients, so the updates become far too small and training stops, without an "
    "error. Put the whole chain inside: "
    "`loss_scaled(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))`, or "
    "let Buoy clip: `loss_scaled(optax.adamw(1e-3), max_norm=1.0)`."
)

_AROUND: dict[type[Any], str] = {
    optax.MultiStepsState: _MULTI_STEPS,
    optax.ApplyIfFiniteState: _APPLY_IF_FINITE,
    optax.MaskedState: _MASKED,
    optax.ConditionallyTransformState: _CONDITIONAL,
}


def warn_of_nesting(tree: Any, is_state: Callable[[Any], bool]) -> bool:
    """Warn and return True if the structure of a tree shows a wrong nesting.

    `is_state` tells the state of `loss_scaled`, of which the tree holds one.  Of
    several wrong nestings the outermost is reported.
    """
    path = [tree]
    while not is_state(path[-1]):
        held = _children(path[-1])
        path.append(next(child for child in held if _holds(child, is_state)))
    for node, child in pairwise(path):
        message = _wrong(node, child)
        if message is not None:
            warn(message)
            return True
    return False


def _children(node: Any) -> list[Any]:
    if isinstance(node, optax.PartitionState):  # masks are how it is made
        return [masked.inner_state for masked in node.inner_states.values()]
    return jax.tree.leaves(node, is_leaf=lambda x: x is not node)


def _holds(tree: Any, is_state: Callable[[Any], bool]) -> bool:
    return any(map(is_state, jax.tree.leaves(tree, is_leaf=is_state)))


def _wrong(node: Any, child: Any) -> str | None:
    """Return what is wrong with `child`, which holds the state, being in `node`."""
    if isinstance(node, optax.PartitionState):
        return _partitioned(node, child)
    if type(node) in _AROUND:
        return _AROUND[type(node)]
    if type(node) is tuple:
        return _chained(node, child, "an `optax.chain`")
    if type(node) is OrderedDict:
        return _chained(tuple(node.values()), child, "an `optax.named_chain`")
    return None


def _partitioned(node: Any, child: Any) -> str | None:
    """Labels whose transformation has no state at all are those that are frozen."""
    others = [
        repr(label)
        for label, masked in node.inner_states.items()
        if masked.inner_state is not child
        and not isinstance(masked.inner_state, optax.EmptyState)
    ]
    return _PARTITION.format(others=", ".join(others)) if others else None


def _chained(states: tuple[Any, ...], child: Any, chain: str) -> str | None:
    place = next(i for i, state in enumerate(states) if state is child)
    before = states[:place]
    if not before or not all(map(_is_of_transformation, before)):
        return None
    return _CHAIN.format(place=place + 1, chain=chain)


def _is_of_transformation(state: Any) -> bool:
    """Return whether this is the state of a transformation, not e.g. parameters.

    Optax's states are named tuples, and those of its chains are tuples of them.
    """
    if type(state) in (tuple, OrderedDict):
        held = state.values() if isinstance(state, OrderedDict) else state
        return all(map(_is_of_transformation, held))
    return hasattr(state, "_fields")
