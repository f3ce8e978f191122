"""`TorchRule` is the kernel of `torch.amp.GradScaler`, bit for bit."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import buoy
from buoy._core.bounds import moved
from buoy._core.formats import FLOAT32_MAX
from buoy._core.ops import PLAIN
from buoy._core.policies.torch_rule import TorchRule
from buoy.testing import check_policy

torch = pytest.importorskip("torch")

POLICIES = st.builds(
    TorchRule,
    init_scale=st.floats(2.0**-20, 2.0**120),
    growth_factor=st.one_of(st.just(2.0), st.floats(1.001, 1e6)),
    backoff_factor=st.one_of(st.just(0.5), st.floats(1e-6, 0.999)),
    growth_interval=st.integers(1, 4),
)


def kernel(policy, history):
    """Run torch's kernel; yield the scale and the tracker after each step."""
    scale = torch.tensor(policy.init_scale, dtype=torch.float32)
    tracker = torch.tensor(0, dtype=torch.int32)
    for finite in history:
        torch._amp_update_scale_(
            scale,
            tracker,
            torch.tensor(0.0 if finite else 1.0),
            policy.growth_factor,
            policy.backoff_factor,
            policy.growth_interval,
        )
        yield scale.item(), tracker.item()


@given(POLICIES, st.lists(st.booleans(), max_size=60))
def test_the_rule_is_torchs_kernel(policy, history):
    """Every scale and every count, also where a product is no float32."""
    state = policy.init()
    for finite, expected in zip(history, kernel(policy, history), strict=True):
        state = policy.update(state, buoy.Seen(finite=finite))
        assert (state.scale, state.clean_steps) == expected


@given(POLICIES, st.lists(st.booleans(), max_size=30))
def test_the_rule_is_the_same_on_tensors(policy, history):
    """As it runs where only the device knows the outcome."""
    state = buoy.lift(policy, policy.init(), "torch")
    for finite, expected in zip(history, kernel(policy, history), strict=True):
        state = policy.update(state, buoy.Seen(finite=torch.tensor(finite)))
        assert (state.scale.item(), state.clean_steps.item()) == expected


@pytest.mark.parametrize("finite", [True, False])
def test_the_scale_stays_finite_and_positive_within_the_bounds(finite):
    """The kernel refuses growth to inf; the floor is that of the bounds."""
    policy = TorchRule(growth_interval=1)
    state = policy.init()
    for _ in range(400):
        state = moved(policy, state, buoy.Seen(finite=finite), ops=PLAIN)

    assert state.scale == (2.0**127 if finite else policy.bounds.low)
    assert policy.bounds.high == FLOAT32_MAX
    assert math.isfinite(1.0 / state.scale)


def test_it_is_the_preset():
    """`buoy.policy("torch")` has torch's own arguments."""
    assert buoy.policy("torch", growth_interval=7) == TorchRule(growth_interval=7)


def test_the_contract_holds_while_the_scale_is_within_the_bounds():
    """Few overflows in a row: further ones lead to 0, as in torch."""
    check_policy(TorchRule(backoff_factor=0.999), backends=("torch",), examples=20)
