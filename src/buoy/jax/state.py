"""The state of `loss_scaled`, as one pytree."""

from collections.abc import Hashable
from dataclasses import dataclass, field, fields
from typing import Any

import jax
import jax.numpy as jnp

from buoy._core.policies.policy import Policy
from buoy._core.ring import COLUMNS
from buoy._core.state import State, numbers
from buoy.jax.errors import StructureError, UnhashablePolicyError

__all__ = [
    "LossScaledState",
    "Plan",
    "check_state",
    "initial_state",
    "make_plan",
]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The static part of the state: JAX compiles once per plan."""

    policy: Policy
    axes: tuple[Hashable, ...] | None
    names: tuple[str, ...]
    digest: int  # the hash, computed once: JAX needs it at every call

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Plan) or self.digest != other.digest:
            return False
        mine = (self.policy, self.axes, self.names)
        return mine == (other.policy, other.axes, other.names)

    def __hash__(self) -> int:
        return self.digest


def make_plan(
    policy: Policy, axes: tuple[Hashable, ...] | None, names: tuple[str, ...]
) -> Plan:
    """Return a plan; raise for a policy that is not hashable, naming the field."""
    try:
        return Plan(policy, axes, names, hash((policy, axes, names)))
    except TypeError as error:
        culprit = _unhashable_field(policy)
        message = (
            f"{type(policy).__name__} cannot be part of a compiled function: "
            f"{culprit} has no hash ({error}). Give it a hashable value, e.g. a tuple "
            "for a list, and make the policy a frozen dataclass."
        )
        raise UnhashablePolicyError(message) from error


def _unhashable_field(policy: Any) -> str:
    for item in fields(policy):
        value = getattr(policy, item.name)
        try:
            hash(value)
        except TypeError:
            return f"its field `{item.name}`, {value!r},"
    return "the policy itself"


@dataclass(frozen=True, slots=True)
class LossScaledState:
    """The scale, the inner optimizer's state, and a log of the last steps.

    `rows` and `bad` are ring buffers: step i is in row i modulo their length.
    """

    scaling: State  # the policy's state
    inner: Any  # the inner transformation's state
    steps: jax.Array  # int32 []: updates so far, skipped ones too
    rows: jax.Array  # float32 [history, len(COLUMNS)]
    bad: jax.Array  # bool [history, leaves]: which gradients were not finite
    plan: Plan = field(metadata={"static": True})


def initial_state(
    scaling: State, inner: Any, history: int, plan: Plan
) -> LossScaledState:
    """Return the state before the first step."""
    return LossScaledState(
        scaling=scaling,
        inner=inner,
        steps=jnp.zeros((), jnp.int32),
        rows=jnp.zeros((history, len(COLUMNS)), jnp.float32),
        bad=jnp.zeros((history, len(plan.names)), jnp.bool_),
        plan=plan,
    )


_ARRAYS = {
    jnp.integer: "an integer array",
    jnp.floating: "a floating-point array",
    jnp.bool_: "a boolean array",
}


def check_state(state: LossScaledState) -> None:
    """Raise for a damaged state, naming the field; reads only shapes and dtypes."""
    expected = {
        "steps": (jnp.integer, ()),
        "rows": (jnp.floating, (None, len(COLUMNS))),
        "bad": (jnp.bool_, (None, len(state.plan.names))),
    }
    for name, (kind, shape) in expected.items():
        _check_array(name, getattr(state, name), kind, shape)
    if jnp.shape(state.rows)[0] != jnp.shape(state.bad)[0]:
        raise _damaged("rows", state.rows, f"{len(state.bad)} rows, as many as `bad`")
    held = {"scale": None, **numbers(state.scaling)}
    for name, value in held.items():
        kind = jnp.floating if name == "scale" else None
        _check_array(f"scaling.{name}", value, kind, ())


def _check_array(name: str, value: Any, kind: Any, shape: tuple[Any, ...]) -> None:
    plain = isinstance(value, (bool, int, float))
    dtype = jnp.result_type(value) if plain else getattr(value, "dtype", None)
    found = () if plain else getattr(value, "shape", None)
    if dtype is None or found is None:
        raise _damaged(name, value, "an array")
    if kind is not None and not jnp.issubdtype(dtype, kind):
        raise _damaged(name, value, _ARRAYS[kind])
    fits = len(found) == len(shape) and all(
        want in (None, have) for want, have in zip(shape, found, strict=True)
    )
    if not fits or 0 in found[:1]:
        raise _damaged(name, value, f"an array of shape {shape}".replace("None", "n"))


def _damaged(name: str, value: Any, expected: str) -> StructureError:
    kind = f"{getattr(value, 'dtype', type(value).__name__)}"
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    return StructureError(
        f"This state of `loss_scaled` is damaged: its `{name}` is {kind}{shape}, but "
        f"must be {expected}. Restore it into the structure of `tx.init(params)`, or "
        "start from there. A state made under `vmap` or `pmap` must be used there."
    )


jax.tree_util.register_dataclass(
    LossScaledState,
    data_fields=[f.name for f in fields(LossScaledState) if not f.metadata],
    meta_fields=[f.name for f in fields(LossScaledState) if f.metadata],
)
