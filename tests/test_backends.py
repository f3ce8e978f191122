"""The same rule runs on NumPy, torch and JAX, eager and traced, and agrees."""

import math
import random

import pytest

import buoy
from buoy._backends.compare import differs
from buoy._core.ops import PLAIN, ops_of
from buoy._core.state import map_state
from buoy.testing import Opaque, check_policy, opaque_ops
from tests.arrays import run_jax_single

np = pytest.importorskip("numpy")

POLICIES = {
    "backoff": buoy.Backoff(growth_interval=3),
    "odd factors": buoy.Backoff(
        init_scale=1000.1, growth_factor=1.3, backoff_factor=0.7, growth_interval=2
    ),
    "hysteresis": buoy.Backoff(growth_interval=3, hysteresis=2),
    "tolerance": buoy.Backoff(growth_interval=3, tolerance=0.25),
    "headroom": buoy.Headroom(),
    "static": buoy.Static(),
    "none": buoy.NoScaling(),
}


def histories(count=3, steps=150):
    """Make seeded histories of all kinds of events."""
    rng = random.Random(0)
    shares = [math.nan, 0.0, 1e-7, 0.1]
    return [
        [
            (
                rng.random() > 0.2,
                rng.choice([-math.inf, rng.uniform(-20, 16)]),
                rng.choice(shares),
                2.0 ** rng.uniform(-20, 20),
            )
            for _ in range(steps)
        ]
        for _ in range(count)
    ]


def seen_of(policy, event):
    """Give a policy all that it wants."""
    return buoy.Seen(
        finite=event[0],
        amax_log2=event[1] if "amax_log2" in policy.wants else None,
        underflow=event[2] if "underflow" in policy.wants else None,
        loss_finite=event[3] < 2.0**18 if "loss_finite" in policy.wants else None,
    )


@pytest.mark.parametrize("backend", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("name", [*POLICIES, "lognormal"])
def test_scales_equal_those_of_plain_numbers(name, backend):
    """Eager NumPy and torch, and JAX under jit, give the same scales, bit for bit."""
    pytest.importorskip(backend)
    policy = POLICIES.get(name, buoy.LogNormal())

    assert differs(policy, backend, histories(), seen_of) is None


@pytest.mark.parametrize("backend", ["numpy", "torch", "jax"])
def test_ops_are_found_by_type(backend):
    """A scalar of a framework brings that framework's functions; plain ones do not."""
    module = pytest.importorskip(f"buoy._backends.{backend}")
    lifted = module.lift(3.0)

    assert module.ops() is ops_of(True, lifted)
    assert ops_of(1, 2.0, None) is PLAIN


@pytest.mark.parametrize("backend", ["numpy", "torch", "jax"])
def test_powers_of_two_are_exact(backend):
    """`exp2` of whole numbers is exact, `floor` and `log2` agree with Python's."""
    module = pytest.importorskip(f"buoy._backends.{backend}")
    ops = module.ops()
    for power in range(-126, 128):
        assert 2.0**power == float(ops.exp2(module.lift(float(power))))
    for x in (-1.5, -1.0, 0.25, 7.99):
        assert math.floor(x) == float(ops.floor(module.lift(x)))
    assert -math.inf == float(ops.log2(module.lift(0.0)))
    assert math.isnan(float(ops.log2(module.lift(-1.0))))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["backoff", "hysteresis", "headroom", "lognormal"])
def test_the_rule_compiles_to_one_torch_graph(name):
    """`torch.compile(fullgraph=True)` takes the whole update as it is, and agrees."""
    torch = pytest.importorskip("torch")
    torch._dynamo.reset()  # what other tests compiled stays theirs
    policy = POLICIES.get(name, buoy.LogNormal())

    @torch.compile(fullgraph=True, backend="eager")
    def step(state, loss, seen):
        return policy.update(policy.foresee(state, loss), seen)

    state, plain = buoy.lift(policy, policy.init(), "torch"), policy.init()
    for event in histories(1, 40)[0]:
        seen = seen_of(policy, event)
        loss = torch.tensor(event[3])
        state = step(state, loss, buoy.lift(policy, seen, "torch"))
        plain = policy.update(policy.foresee(plain, event[3]), seen)

        assert plain.scale == state.scale.item()


def test_the_rule_runs_on_fake_tensors():
    """Fake tensors, which have no value to read, pass through every policy."""
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    from buoy._backends.torch import lift

    with FakeTensorMode():
        for policy in (*POLICIES.values(), buoy.LogNormal()):
            state = map_state(lambda x, p=policy: lift(x, p.precision), policy.init())
            event = (True, 3.0, 0.5, 1.0)
            seen = map_state(lift, seen_of(policy, event))
            state = policy.update(policy.foresee(state, lift(1.0)), seen)

            assert isinstance(state.scale, torch.Tensor)
            assert () == tuple(state.scale.shape)


def test_scan_in_single_precision_agrees_without_x64():
    """As JAX users run it, float32 and x64 off, scan gives the plain trajectory."""
    pytest.importorskip("jax")
    rng = np.random.default_rng(0)
    finite = rng.random((300, 8)) > 0.2
    for name in ("backoff", "odd factors", "hysteresis", "tolerance"):
        policy = POLICIES[name]
        ran = run_jax_single(policy, finite, None)
        for column in range(finite.shape[1]):
            state = policy.init()
            for row in range(len(finite)):
                state = policy.update(
                    state, buoy.Seen(finite=bool(finite[row, column]))
                )
                assert state.scale == ran.scales[row, column]


@pytest.mark.parametrize("name", POLICIES)
def test_states_pass_through_jit_as_they_are(name):
    """`jax.jit` takes a plain state and a `Seen`: both are pytrees by themselves."""
    jax = pytest.importorskip("jax")
    policy = POLICIES[name]
    event = (False, 3.0, 0.5, 1.0)
    seen = seen_of(policy, event)
    after = jax.jit(policy.update)(policy.init(), seen)

    assert policy.update(policy.init(), seen).scale == float(after.scale)


@pytest.mark.parametrize("backend", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("name", [*POLICIES, "chainer", "guided_diffusion", "metaseq"])
def test_a_plain_state_meets_array_events(name, backend):
    """A state of plain numbers goes on with another framework's flags, unprepared."""
    module = pytest.importorskip(f"buoy._backends.{backend}")
    policy = POLICIES.get(name) or buoy.policy(name)
    if backend == "jax" and policy.precision == "float64":
        with pytest.raises(buoy.PolicyError, match="jax_enable_x64"):
            policy.update(policy.init(), buoy.Seen(finite=module.lift(True)))
        return
    state = plain = policy.init()
    for finite in (False, True, True, False, True):
        seen = seen_of(policy, (finite, 3.0, 0.5, 1.0))
        state = policy.update(state, map_state(module.lift, seen))
        plain = policy.update(plain, seen)

        assert plain.scale == float(state.scale)


def test_lifting_names_what_is_missing():
    """A backend that is unknown or not installed is named, with what to install."""
    policy = buoy.Backoff()

    with pytest.raises(buoy.MissingBackendError, match="caffe.*numpy, torch, jax"):
        buoy.lift(policy, policy.init(), "caffe")


def test_the_rule_maps_over_a_batch_of_states():
    """`jax.vmap` runs many states at once."""
    jax = pytest.importorskip("jax")
    policy = POLICIES["backoff"]
    one = buoy.lift(policy, policy.init(), "jax")
    batch = map_state(lambda x: jax.numpy.full(4, x), one)
    seen = buoy.Seen(finite=jax.numpy.array([True, False, True, False]))
    after = jax.vmap(policy.update)(batch, seen)

    assert [2.0**16, 2.0**15] * 2 == after.scale.tolist()


def test_float64_policies_say_what_jax_needs():
    """Without x64 a policy in float64 raises, naming the switch."""
    pytest.importorskip("jax")
    from buoy._backends.jax import lift

    with pytest.raises(buoy.PolicyError, match="jax_enable_x64"):
        lift(1.0, "float64")


def test_a_number_that_cannot_be_read_passes_through():
    """No update looks at a number: one whose every conversion raises comes through."""
    for ops in (None, opaque_ops()):
        for policy in (*POLICIES.values(), buoy.LogNormal()):
            state = map_state(Opaque, policy.init())
            for event in histories(1, 30)[0]:
                seen = map_state(Opaque, seen_of(policy, event))
                state = policy.foresee(state, Opaque(event[3]), ops=ops)
                state = policy.update(state, seen, ops=ops)

            assert isinstance(state.scale, Opaque)


@pytest.mark.parametrize("name", [*POLICIES, "lognormal"])
def test_our_own_policies_hold_the_contract(name):
    """The public contract suite passes on every policy of ours."""
    policy = POLICIES.get(name, buoy.LogNormal())

    check_policy(policy, backends=())
