"""Every policy and preset starts at any scale, also one that only a device knows."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import buoy
from buoy._core.state import map_state

NAMES = sorted(buoy.policies())
POWERS = [2.0**exponent for exponent in range(-20, 25, 4)]


def expected(policy, scale):
    """Give the state of the policy that has this scale as its own start, if any may."""
    try:
        return replace(policy, init_scale=scale).init()
    except (TypeError, ValueError):  # it has no such field, or refuses this value
        return None


@pytest.mark.parametrize("name", NAMES)
@given(st.sampled_from(POWERS))
def test_a_given_scale_is_a_start(name, scale):
    """`init(scale=s)` is the `init()` of the policy whose `init_scale` is s."""
    policy = buoy.policy(name)

    assert policy.init() == policy.init(scale=None)
    assert policy.init(scale=scale) == (
        expected(policy, scale) or policy.init(scale=scale)
    )
    if hasattr(policy, "init_scale"):
        assert policy.init() == policy.init(scale=policy.init_scale)


def test_the_comparison_covers_nearly_every_policy():
    """Only the two policies that have no field `init_scale` escape."""
    missed = [name for name in NAMES if expected(buoy.policy(name), 1.0) is None]

    assert ["loss_ahead", "none"] == missed


@pytest.mark.parametrize("name", ["backoff", "headroom", "lognormal"])
def test_the_start_stays_within_the_bounds(name):
    """Beyond a bound it is the bound; so the contract holds from the first step on."""
    policy = replace(buoy.policy(name), min_scale=4.0, max_scale=2.0**20)

    assert 4.0 == policy.init(scale=1.0).scale
    assert 2.0**20 == policy.init(scale=2.0**30).scale
    assert 64.0 == policy.init(scale=64).scale


def test_headroom_starts_at_a_power_of_two():
    """Its scale always is one: other numbers are rounded down."""
    for scale in (3.0, 4.0 - 2.0**-21, 2.0, 2.5):
        state = buoy.Headroom().init(scale=scale)

        assert state.scale == 2.0


def test_no_scaling_has_one_scale():
    """1 is all that is within its bounds."""
    assert 1.0 == buoy.NoScaling().init(scale=1024.0).scale


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan, "8", True])
@pytest.mark.parametrize("name", ["backoff", "headroom", "static", "lognormal"])
def test_what_cannot_be_a_scale_is_refused(name, scale):
    """A plain number that is no scale is a mistake, and named."""
    with pytest.raises(buoy.PolicyError, match="`scale` must be"):
        buoy.policy(name).init(scale=scale)


def run(policy, state, lift=lambda value: value):
    """Give the scales of a short history from this state on."""
    scales = [float(state.scale)]
    for index in range(40):
        event = {"finite": index % 7 != 6, "amax_log2": float(index % 5)}
        state = policy.update(state, map_state(lift, buoy.Seen(**event)))
        scales.append(float(state.scale))
    return scales


def same(state, plain):
    """Compare two states number by number, bit for bit."""
    return map_state(float, state) == map_state(float, plain)


@pytest.mark.parametrize("name", NAMES)
def test_a_scale_of_numpy_is_a_start(name):
    """NumPy's scalars give the same numbers."""
    np = pytest.importorskip("numpy")
    policy = buoy.policy(name)
    for scale in POWERS:
        assert same(policy.init(scale=np.float32(scale)), policy.init(scale=scale))


@pytest.mark.parametrize("name", NAMES)
def test_a_scale_on_a_torch_device_is_a_start(name):
    """It is never read, and the run that follows is the run from a plain number."""
    torch = pytest.importorskip("torch")
    from buoy._backends.torch import lift
    from tests.torch.no_host_reads import no_host_reads

    policy = buoy.policy(name)
    for scale in POWERS:
        held = torch.tensor(scale)
        with no_host_reads():
            state = buoy.lift(policy, policy.init(scale=held), "torch")
        plain = policy.init(scale=scale)

        assert same(state, plain)
    if getattr(plain, "collapsed", None) is None:
        assert run(policy, plain) == run(
            policy, state, lambda value: lift(value, policy.precision)
        )


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -3.0])
@pytest.mark.parametrize("name", ["backoff", "headroom", "static", "lognormal"])
def test_nonsense_on_a_device_starts_at_a_bound(name, value):
    """Nobody can read and refuse it there; it must not become the scale."""
    torch = pytest.importorskip("torch")
    policy = buoy.policy(name)
    scale = policy.init(scale=torch.tensor(value)).scale

    assert 0.0 < float(scale) < math.inf


@pytest.mark.parametrize("name", NAMES)
def test_a_traced_scale_is_a_start(name):
    """Under `jit` there is nothing to read; the numbers are the same."""
    jax = pytest.importorskip("jax")
    from buoy._backends.jax import register

    policy = buoy.policy(name)
    register(type(policy.init()))
    with jax.enable_x64(policy.precision == "float64"):
        begin = jax.jit(lambda scale: policy.init(scale=scale))
        for scale in POWERS:
            state = begin(jax.numpy.float32(scale))

            assert same(state, policy.init(scale=scale))
