"""What a policy computes in a step, counted without running it on numbers."""

from dataclasses import dataclass, replace
from typing import Any

import pytest

import buoy
from buoy import PolicyError
from buoy._core.symbols import operations, record, state_fields


@dataclass(frozen=True)
class _State:
    scale: Any
    count: Any
    unused: Any = None


@dataclass(frozen=True, kw_only=True)
class _Tiny:
    """Four operations in `foresee`, seven in `update`."""

    factor: float = 2.0
    wants: frozenset[str] = frozenset({"loss", "amax_log2"})
    precision = "float32"
    bounds = buoy.Bounds()

    def init(self, *, scale=None):
        return _State(scale=8.0, count=0)

    def foresee(self, state, loss, *, ops=None):
        ops = ops or buoy.ops_of(loss)
        size = ops.floor(ops.log2(loss))
        return replace(state, scale=ops.where(size > 3.0, 1.0, state.scale))

    def update(self, state, seen, *, ops=None):
        ops = ops or buoy.ops_of(seen.finite)
        shrunk = -(1.0 / self.factor)  # of settings alone: Python's own arithmetic
        constant = ops.exp2(ops.cast(1.5, "float32"))
        shared = state.scale * shrunk  # 1, used twice
        scale = ops.where(seen.finite & (seen.amax_log2 < 9), shared + constant, shared)
        state.count + 1  # 6: computed, and used by nobody
        return replace(state, scale=scale, count=abs(state.count))  # 7


def test_every_operation_counts_once_and_constants_do_not():
    """Also if the result is used twice, or not at all."""
    assert 4 + 7 == operations(_Tiny())
    expected = "log2 floor gt where mul lt and add where add abs"
    assert expected == " ".join(one.kind for one in record(_Tiny()))


def test_foresee_counts_only_where_the_policy_wants_the_loss():
    """Front ends call it only then."""
    assert 7 == operations(_Tiny(wants=frozenset({"amax_log2"})))


def test_operands_stand_in_the_order_of_the_rule():
    """`1 - x` is not `x - 1`."""

    class Reflected(_Tiny):
        wants = frozenset()

        def update(self, state, seen, *, ops=None):
            return replace(state, scale=2.0**state.scale - 1.0)

    power, minus = record(Reflected(wants=frozenset()))
    exponent = power.parts[1]
    assert ("pow", (2.0, exponent)) == (power.kind, power.parts)
    assert ("input", ("scale",)) == (exponent.kind, exponent.parts)
    assert ("sub", (power, 1.0)) == (minus.kind, minus.parts)


def test_a_rule_that_branches_on_a_number_is_refused():
    """The count would be that of one branch."""

    class Branching(_Tiny):
        def update(self, state, seen, *, ops=None):
            return replace(state, scale=1.0) if seen.finite else state

    with pytest.raises(PolicyError, match=r"Use `ops.where`"):
        operations(Branching())


def test_fields_that_a_policy_does_not_use_are_not_counted():
    """States share a class; what a policy leaves None it does not carry."""
    assert ("scale", "count") == state_fields(_Tiny())


@pytest.mark.parametrize("name", buoy.policies())
def test_every_policy_can_be_counted_and_every_preset_is_small(name):
    """Those that read nothing but `finite` take at most 25 operations."""
    policy = buoy.policy(name)

    assert "scale" == state_fields(policy)[0]
    if not policy.wants:
        assert operations(policy) <= 25
