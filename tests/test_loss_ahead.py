"""`LossAhead`: a jump of the loss lowers the scale of that one step, and no other."""

import json
import math
import pickle
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import buoy
from buoy import LossAhead, Seen, Trace
from buoy._backends.compare import differs
from buoy._core.bounds import foreseen, moved
from buoy._core.ops import PLAIN
from buoy._core.policies.loss_ahead import unwrapped
from buoy._core.policies.torch_rule import TorchRule
from buoy._core.state import numbers
from buoy.testing import check_policy
from tests.test_backends import histories, seen_of

TOP = math.log2(65504.0)
WRAPPED = {
    "backoff": buoy.Backoff(growth_interval=3),
    "odd factors": buoy.Backoff(
        init_scale=1000.1, growth_factor=1.3, backoff_factor=0.7, growth_interval=2
    ),
    "headroom": buoy.Headroom(),
    "lognormal": buoy.LogNormal(),
    "static": buoy.Static(init_scale=1000.1),
    "fairseq": buoy.policy("fairseq"),
}


def step(policy, state, size, loss):
    """Take a step of gradients of this size, log2 and unscaled; say if it overflowed.

    Returns the state after it, and the log2 of the scale that it was computed with.
    """
    if "loss" in policy.wants:
        state = foreseen(policy, state, loss, ops=PLAIN)
    used = math.log2(state.scale)
    finite = size + used <= TOP
    seen = Seen(finite, size + used if finite else math.inf)
    return moved(policy, state, seen, ops=PLAIN), used, finite


def lead(policy, sizes, losses):
    """Take many steps; return the exponents used, which were skipped, and the state."""
    state, used, skipped = policy.init(), [], []
    for i, (size, loss) in enumerate(zip(sizes, losses, strict=True)):
        state, exponent, finite = step(policy, state, size, loss)
        used.append(exponent)
        skipped += [] if finite else [i]
    return used, skipped, state


def bump(at, length, *, usual, high):
    """Return a row of the usual number that is high at one place."""
    return [usual] * at + [high] + [usual] * (length - at - 1)


@pytest.mark.parametrize("name", ["headroom", "backoff", "static"])
def test_a_batch_whose_loss_and_gradients_jump_is_applied(name):
    """1000 x: at a scale that is 9 binades lower; a classic rule notices nothing."""
    policy = LossAhead(buoy.policy(name, init_scale=2.0**12))
    sizes = bump(40, 80, usual=0.0, high=10.0)
    losses = bump(40, 80, usual=1.0, high=1000.0)
    used, skipped, _ = lead(policy, sizes, losses)

    assert [] == skipped
    assert used[40] <= used[39] - 9
    if name != "headroom":  # it remembers the size that it was shown
        assert used[41] == used[39]
    if "loss" not in policy.policy.wants:
        assert [40] == lead(policy.policy, sizes, losses)[1]


losses = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=80)


@pytest.mark.parametrize("name", WRAPPED)
@given(losses, st.lists(st.floats(-20.0, 10.0), min_size=80, max_size=80))
def test_loss_ahead_never_raises_the_scale(name, losses, sizes):
    """Whatever it has seen, a step's scale is at most the one that the policy set."""
    policy = LossAhead(WRAPPED[name])
    state = policy.init()
    for loss, size in zip(losses, sizes, strict=False):
        assert state.scale == state.inner.scale
        assert policy.foresee(state, loss).scale <= state.scale
        state, _, _ = step(policy, state, size, loss)


@pytest.mark.parametrize("name", [*WRAPPED, *buoy.policies()])
@settings(max_examples=10)
@given(st.lists(st.floats(-20.0, 20.0), min_size=1, max_size=120))
def test_while_no_loss_jumps_the_policy_does_as_it_does_alone(name, sizes):
    """Losses that fall, and stay: every state inside is the policy's own."""
    alone = WRAPPED.get(name) or buoy.policy(name)
    policy = LossAhead(alone)
    lone, state = alone.init(), policy.init()
    with suppress(buoy.ScaleCollapsedError):
        for i, size in enumerate(sizes):
            loss = max(8.0 * 0.97**i, 1.0)
            state, same, _ = step(policy, state, size, loss)
            lone, used, _ = step(alone, lone, size, loss)
            assert used == same
            assert lone == replace(state.inner, scale=state.scale)


def test_the_policy_is_shown_its_own_scale():
    """The largest gradient as it would have been, no share of small ones."""
    shown = []

    class Looking(buoy.Static):
        wants = frozenset({"amax_log2", "underflow"})

        def update(self, state, seen, *, ops=None):
            shown.append((state.scale, seen))
            return state

    policy = LossAhead(Looking(init_scale=2.0**12))
    state = policy.update(policy.foresee(policy.init(), 1.0), Seen(True, 3.0, 0.5))
    looked = policy.foresee(state, 64.0)
    policy.update(looked, Seen(True, 9.0, 0.5))

    assert (2.0**12, Seen(True, 3.0, 0.5)) == shown[0]
    scale, seen = shown[1]
    assert looked.scale == 2.0**6
    assert (2.0**12, 15.0) == (scale, seen.amax_log2)
    assert math.isnan(seen.underflow)


def test_two_losses_in_a_row_are_a_new_level():
    """Then the policy has the scale to itself again; it falls back slowly."""
    policy = LossAhead(buoy.Static())
    row = [1.0] * 8 + [256.0] * 4 + [1.0] * 40 + [256.0]
    used, _, _ = lead(policy, [-9.0] * len(row), row)

    lowered = [10.0 - exponent for exponent in used]
    assert [0.0] * 8 + [8.0, 8.0, 0.0, 0.0] + [0.0] * 40 == lowered[:-1]
    assert 1.0 < lowered[-1] < 8.0


@pytest.mark.parametrize("loss", [0.0, math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_teaches_nothing(loss):
    """Neither does one that another loss of the step makes not finite."""
    policy = LossAhead("headroom")
    _, _, before = lead(policy, [-5.0] * 20, [1.0] * 20)
    looked = policy.foresee(before, loss)
    after = policy.update(looked, Seen(finite=False, amax_log2=math.nan))
    told = policy.update(
        policy.foresee(before, 1e6),
        Seen(finite=False, amax_log2=math.nan, loss_finite=False),
    )

    assert looked.scale == before.scale
    for state in (after, told):
        assert replace(before, inner=state.inner, scale=state.scale) == state


def test_a_negative_loss_counts_by_its_size():
    """As the gradients do."""
    policy = LossAhead(buoy.Static())
    used, _, _ = lead(policy, [-9.0] * 9, [-1.0] * 8 + [-256.0])

    assert 2.0 == used[-1]


def test_false_alarms_are_believed_four_times():
    """Then not, until the gradients follow a jump, or overflow."""
    noisy = [1.0, 1.0, 64.0] * 8
    policy = LossAhead("lognormal")
    used, _, state = lead(policy, [-5.0] * len(noisy), noisy)
    jumps = [used[i] < min(used[i - 1], used[i + 1]) - 3 for i in range(2, 22, 3)]

    assert [True] * 4 + [False] * 3 == jumps
    assert 4.0 == state.doubts
    for size in (1.0, 40.0):  # it follows; it overflows
        believing, _, _ = step(policy, state, size, 64.0)
        assert 0.0 == believing.doubts


def test_without_the_size_of_the_gradients_every_alarm_is_believed():
    """The wrapper measures nothing: such a policy stays as cheap as it is."""
    policy = LossAhead("backoff")
    noisy = [1.0, 1.0, 64.0] * 8
    state = policy.init()
    for loss in noisy:
        looked = policy.foresee(state, loss)
        state = policy.update(looked, Seen(finite=True))

    assert {"loss"} == policy.wants
    assert looked.scale == state.scale / 64
    assert 0.0 == state.doubts


def test_the_scale_stays_above_the_policy_s_floor():
    """A jump ends at it, and is not forgotten."""
    policy = LossAhead(buoy.Backoff(init_scale=8.0, min_scale=1.5))
    state = policy.update(policy.foresee(policy.init(), 1.0), Seen(finite=True))
    looked = policy.foresee(state, 1e6)

    assert 2.0 == looked.scale
    assert 8.0 == policy.update(looked, Seen(finite=True)).scale


def test_a_scale_that_others_set_is_gone_on_from():
    """Also in a step whose loss jumps."""
    policy = LossAhead(buoy.Backoff())
    state = policy.update(policy.foresee(policy.init(), 1.0), Seen(finite=True))
    set_before = policy.foresee(replace(state, scale=2.0**10), 16.0)
    capped = replace(policy.foresee(state, 16.0), scale=2.0**4)

    assert 2.0**6 == set_before.scale
    assert 2.0**9 == policy.update(set_before, Seen(finite=False)).scale
    assert 2.0**8 == policy.update(capped, Seen(finite=True)).scale


def test_a_policy_that_gives_up_does_so_inside():
    """The state to continue from is the wrapper's; on arrays the flag is seen."""
    policy = LossAhead("fairseq", init_scale=2.0**-12)
    state = policy.update(policy.init(), Seen(finite=False))
    with pytest.raises(buoy.ScaleCollapsedError) as caught:
        policy.update(state, Seen(finite=False))

    after = caught.value.state
    assert isinstance(after, type(state))
    assert (after.scale, after.collapsed) == (after.inner.scale, True)
    assert LossAhead().init().collapsed is None


@pytest.mark.parametrize("backend", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("name", ["backoff", "odd factors", "headroom", "lognormal"])
def test_scales_equal_those_of_plain_numbers(name, backend):
    """Eager NumPy and torch, and JAX under jit, give the same scales, bit for bit."""
    pytest.importorskip(backend)
    assert differs(LossAhead(WRAPPED[name]), backend, histories(), seen_of) is None


# Presets that leave their bounds, or give NaN, because the scalers do that they are of.
LOOSE = """
apex colossalai fairscale_sharded fairseq2 fastai fsdp guided_diffusion jaxamp keras
mxnet nemo nnabla openseq2seq_logmax paddle torch
""".split()


@pytest.mark.parametrize("name", [n for n in buoy.policies() if n not in LOOSE])
def test_every_policy_holds_the_contract_when_it_is_wrapped(name):
    """By name: within its bounds, pure, saved as it is, never read."""
    check_policy(LossAhead(name), backends=(), examples=20)


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_the_contract_holds_on_tensors(backend):
    """By its default."""
    pytest.importorskip(backend)
    check_policy(LossAhead(), backends=(backend,), examples=5)


@pytest.mark.parametrize("name", buoy.policies())
def test_bounds_and_wants_are_those_of_the_policy(name):
    """Front ends ask for them by name."""
    policy, wrapped = buoy.policy(name), LossAhead(name)

    assert policy.bounds == wrapped.bounds
    assert policy.precision == wrapped.precision
    assert policy.wants | {"loss"} == wrapped.wants
    assert policy.init(scale=8.0) == wrapped.init(scale=8.0).inner


def test_loss_ahead_is_made_by_name_and_by_object():
    """Everywhere a policy is; with the wrapped policy's parameters beside its name."""
    by_name = buoy.policy("loss_ahead", policy="backoff", growth_interval=5)

    assert LossAhead(buoy.Backoff(growth_interval=5)) == by_name
    assert LossAhead("headroom") == LossAhead() == buoy.policy("loss_ahead")
    assert hash(by_name) != hash(LossAhead())
    assert isinstance(unwrapped(LossAhead("torch")), TorchRule)
    with pytest.raises(buoy.UnknownPolicyError, match="headroom"):
        LossAhead("hedroom")
    with pytest.raises(buoy.PolicyError, match="must be a policy"):
        LossAhead(3.0)


def test_a_run_goes_on_as_if_it_had_not_been_saved():
    """Policy and state, as JSON and pickled, in the middle of a step."""
    policy = LossAhead(buoy.LogNormal())
    row = [1.0, 1.2, 30.0, 1.1, 0.9, 700.0, 2.0] * 5
    _, _, state = lead(policy, [-5.0] * 35, row)
    looked = policy.foresee(state, 50.0)
    again = buoy.decode(json.loads(json.dumps(buoy.encode(policy))))

    assert policy == again == pickle.loads(pickle.dumps(policy))  # noqa: S301
    for copy in (
        buoy.decode(json.loads(json.dumps(buoy.encode(looked)))),
        pickle.loads(pickle.dumps(looked)),  # noqa: S301
    ):
        assert looked == copy
        seen = Seen(finite=True, amax_log2=2.0)
        assert policy.update(looked, seen) == again.update(copy, seen)


def test_the_numbers_of_a_state_have_names():
    """Front ends that keep them one by one use these."""
    found = list(numbers(LossAhead("backoff").init()))

    assert found[:3] == ["scale", "inner.scale", "inner.clean_steps"]


def test_replay_shows_it_the_loss():
    """A trace whose loss jumps with its gradients loses no step."""
    sizes = bump(50, 100, usual=2.0, high=14.0)
    trace = Trace(amax_log2=sizes, loss_log2=sizes)
    static = buoy.Static(init_scale=2.0**8)
    alone, ahead = buoy.replay(trace, [static, LossAhead(static)])

    assert [50] == list(alone.skips)
    assert [] == list(ahead.skips)
    assert [(0, 50), (50, 51), (51, 100)] == [run[:2] for run in ahead.scales()]
