"""The contract suite finds each kind of broken policy."""

import dataclasses
import math
import sys
from dataclasses import dataclass

import pytest

import buoy
from buoy.testing import ContractError, Opaque, check_policy


@dataclass(frozen=True)
class CountState:
    scale: float
    count: int


@dataclass(frozen=True, kw_only=True)
class Good:
    """A sound little policy: halve on overflow, double on every clean step."""

    min_scale: float = 1.0
    max_scale: float = 2.0**20
    wants = frozenset()
    precision = "float32"

    @property
    def bounds(self):
        return buoy.Bounds(self.min_scale, self.max_scale)

    def init(self, *, scale=None):
        return CountState(1024.0 if scale is None else scale, 0)

    def foresee(self, state, loss, *, ops=None):
        return state

    def update(self, state, seen, *, ops=None):
        ops = ops or buoy._core.ops.ops_of(seen.finite, state.scale)
        scale = ops.where(seen.finite, self.up(state), state.scale * 0.5)
        scale = ops.where(scale > self.max_scale, self.max_scale, scale)
        scale = ops.where(scale < self.min_scale, self.min_scale, scale)
        return CountState(scale, state.count + 1)

    def up(self, state):
        return state.scale * 2.0


class NoCeiling(Good):
    def update(self, state, seen, *, ops=None):
        return CountState(state.scale * (2.0 if seen.finite else 0.5), 0)


class RaisesOnOverflow(Good):
    def update(self, state, seen, *, ops=None):
        ops = ops or buoy._core.ops.ops_of(seen.finite, state.scale)
        return CountState(ops.where(seen.finite, 1.0, 2.0), 0)


class TurnsNaN(Good):
    wants = frozenset({"amax_log2"})

    def update(self, state, seen, *, ops=None):
        ops = ops or buoy._core.ops.ops_of(seen.finite, state.scale)
        return CountState(ops.where(seen.finite, 0.0 * seen.amax_log2 + 1.0, 1.0), 0)


class ReadsOnHost(Good):
    def update(self, state, seen, *, ops=None):
        return CountState(1024.0 if bool(seen.finite) else 512.0, 0)


class Impure(Good):
    calls: list = []  # noqa: RUF012

    def update(self, state, seen, *, ops=None):
        self.calls.append(1)
        return CountState(state.scale * 1.0, len(self.calls))


class RaisesInForesee(Good):
    def foresee(self, state, loss, *, ops=None):
        return dataclasses.replace(state, scale=state.scale * 2.0)


class Rounds(Good):
    def up(self, state):
        return state.scale * 1.1


class WrongOnArrays(Good):
    def up(self, state):
        return state.scale * (2.0 if isinstance(state.scale, (float, Opaque)) else 4.0)


class Mutable(Good):
    def init(self, *, scale=None):
        return State()


@dataclass
class State:
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Forgetful(Good):
    note: float = 1.0

    def __post_init__(self):
        object.__setattr__(self, "note", 1.0 if self.note == 2.0 else self.note)

    def __eq__(self, other):
        return self is other

    __hash__ = object.__hash__


@dataclass(frozen=True, kw_only=True)
class Starts(Good):
    """The same policy, with a field for its start."""

    init_scale: float = 1024.0

    def init(self, *, scale=None):
        return CountState(self.init_scale if scale is None else scale, 0)


class StartsElsewhere(Starts):
    def init(self, *, scale=None):
        return CountState(self.init_scale if scale is None else scale * 2.0, 0)


class ReadsItsStart(Starts):
    def init(self, *, scale=None):
        return CountState(self.init_scale if scale is None else float(scale), 0)


class NeedsAStart(Starts):
    def init(self, *, scale=512.0):
        return CountState(self.init_scale if scale is None else scale, 0)


@dataclass(frozen=True, kw_only=True)
class Unbounded:
    """What a policy was before there were `bounds` and the keyword of `init`."""

    wants = frozenset()
    precision = "float32"

    def init(self):
        return CountState(1024.0, 0)

    def foresee(self, state, loss, *, ops=None):
        return state

    def update(self, state, seen, *, ops=None):
        return state


class Undecided(Good):
    started: list = []  # noqa: RUF012

    def init(self, *, scale=None):
        self.started.append(1)
        return CountState(1024.0, len(self.started))


class WantsWings(Good):
    wants = frozenset({"wings"})


class InHalf(Good):
    precision = "float16"


class AsksWhereItStarts(Good):
    def init(self, *, scale=None):
        start = 512.0 if isinstance(scale, Opaque) else scale
        return CountState(1024.0 if start is None else start, 0)


class OtherOnDevices(Good):
    def update(self, state, seen, *, ops=None):
        after = super().update(state, seen, ops=ops)
        hidden = isinstance(state.scale, Opaque)
        return dataclasses.replace(after, count=after.count + hidden)


class Loose:
    """As good as `Good`, and no dataclass."""

    wants = frozenset()
    precision = "float32"
    bounds = buoy.Bounds()

    def init(self, *, scale=None):
        return CountState(1024.0 if scale is None else scale, 0)

    def foresee(self, state, loss, *, ops=None):
        return state

    def update(self, state, seen, *, ops=None):
        return state


class Downwards(Good):
    @property
    def bounds(self):
        return buoy.Bounds(8.0, 4.0)


@pytest.mark.parametrize("given", [Unbounded(), Good, 3])
def test_what_is_no_policy_is_refused_with_what_to_add(given):
    """By `check_policy`, and wherever a policy is passed."""
    expected = "Make a policy of the class: Good" if given is Good else "`bounds`, e.g."
    with pytest.raises(ContractError, match=expected):
        check_policy(given)
    with pytest.raises(buoy.PolicyError, match=expected):
        buoy.policy(given)


def test_an_init_without_the_keyword_is_refused_with_what_to_write():
    """Front ends start policies at the scale of a checkpoint."""

    class Fixed(Good):
        def init(self):
            return CountState(1024.0, 0)

    with pytest.raises(buoy.PolicyError, match=r"`def init\(self, \*, scale=None\)`"):
        buoy.policy(Fixed())


def test_bounds_that_are_none_are_refused():
    """An empty range, or one that has 0 in it."""
    with pytest.raises(buoy.PolicyError, match="positive and in order"):
        check_policy(Downwards())


def test_a_sound_policy_of_a_third_party_passes():
    """A policy that we have never seen passes, on every installed backend."""
    check_policy(Good(), examples=20)
    check_policy(Starts(), examples=20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "clause"),
    [
        (NoCeiling, "finite|bounds|no host read"),
        (RaisesOnOverflow, "overflow"),
        (TurnsNaN, "finite"),
        (ReadsOnHost, "no host read"),
        (Impure, "pure|no host read"),
        (RaisesInForesee, "foresee|bounds"),
        (WrongOnArrays, "numpy equals plain"),
        (Mutable, "frozen"),
        (Forgetful, "encode/decode"),
        (StartsElsewhere, "init"),
        (ReadsItsStart, "no host read"),
        (NeedsAStart, "init"),
    ],
)
def test_each_kind_of_broken_policy_fails(policy, clause):
    """The suite names the clause that is broken."""
    with pytest.raises(ContractError, match=f"^({clause}):"):
        check_policy(policy(), backends=("numpy",), examples=20)


def test_rounding_that_differs_between_backends_is_found():
    """A factor that float32 cannot hold, used without rounding, is caught."""
    with pytest.raises(ContractError, match="equals plain"):
        check_policy(Rounds(), backends=("numpy",), examples=5)


@pytest.mark.long
@pytest.mark.parametrize("preset", ["torch", "nemo", "fsdp"])
def test_presets_without_bounds_do_not_hold_it(preset):
    """Peers whose scale reaches 0 or inf are reproduced, not recommended."""
    with pytest.raises(ContractError, match="finite|bounds"):
        check_policy(buoy.policy(preset, growth_interval=1), backends=())


def test_opaque_numbers_compute_but_cannot_be_read():
    """Arithmetic works; every conversion raises."""
    x = Opaque(3.0) * 2 + 1

    for read in (bool, float, int, round, math.floor):
        with pytest.raises(ContractError, match="no host read"):
            read(x)


@pytest.mark.parametrize(
    ("policy", "clause"),
    [
        (Loose, "frozen"),
        (Undecided, "pure"),
        (WantsWings, "wants"),
        (InHalf, "precision"),
        (AsksWhereItStarts, "no host read"),
        (OtherOnDevices, "no host read"),
    ],
)
def test_a_policy_that_is_broken_from_the_start_fails(policy, clause):
    """Before any history is tried, or by its results on a device."""
    with pytest.raises(ContractError, match=f"^{clause}:"):
        check_policy(policy(), backends=(), examples=1)


def test_an_unknown_backend_is_refused():
    """A policy is not compared with what does not exist."""
    with pytest.raises(ContractError, match="'keras' must be numpy, torch or jax"):
        check_policy(Good(), backends=("keras",), examples=1)


def test_the_suite_without_hypothesis_says_what_to_install(monkeypatch):
    """It is a tool for developers, and no dependency."""
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(buoy.MissingBackendError, match="pip install hypothesis"):
        check_policy(Good(), backends=())
