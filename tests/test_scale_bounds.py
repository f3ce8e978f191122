"""No policy takes the scale out of its bounds, in any front end."""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest

import buoy
from buoy._core.bounds import bounds_of, foreseen, initial, moved
from buoy._core.formats import FLOAT32_MAX
from buoy._core.ops import PLAIN
from buoy._core.state import map_state
from buoy.trace import Trace

BAD = [math.nan, 0.0, -1.0, -math.inf, math.inf]
ZEROS = buoy.Seen(finite=True, amax_log2=-math.inf)


@dataclass(frozen=True)
class BrokenState:
    """A scale, and a number that goes wrong with it."""

    scale: Any
    moment: Any = 1.0


@dataclass(frozen=True)
class Broken:
    """Returns `bad` from `at`: "init", "foresee" or "update"."""

    bad: float = math.nan
    at: str = "update"
    init_scale: float = 8.0
    max_scale: float = FLOAT32_MAX

    wants = frozenset({"loss"})
    precision = "float32"

    @property
    def bounds(self):
        """The usual ones."""
        return buoy.Bounds(high=self.max_scale)

    def init(self, *, scale=None):
        """Start."""
        return BrokenState(self.bad if self.at == "init" else scale or self.init_scale)

    def foresee(self, state, loss, *, ops=None):
        """Replace the scale."""
        return self._wrong(state) if self.at == "foresee" else state

    def update(self, state, seen, *, ops=None):
        """Replace the scale."""
        return self._wrong(state) if self.at == "update" else state

    def _wrong(self, state):
        bad = state.scale * 0.0 + self.bad
        return BrokenState(bad, state.moment * 0.0 + math.nan)


def same_or_bound(state, bad):
    """Check what is kept: the old state, or the upper bound for an infinite scale."""
    high = bounds_of(Broken()).high
    expected = (high, math.nan) if bad == math.inf else (8.0, 1.0)
    got = float(state.scale), float(state.moment)
    assert repr(expected) == repr(got)


@pytest.mark.parametrize("bad", [*BAD, None, "8", True])
def test_a_bad_scale_is_an_error_where_the_host_sees_it(bad):
    """It names the class, the method and the value."""
    for at in ("foresee", "update"):
        policy = Broken(at=at)
        object.__setattr__(policy, "_wrong", lambda *_: BrokenState(bad))
        state, call = policy.init(), {"foresee": foreseen, "update": moved}[at]
        with pytest.raises(buoy.PolicyError, match=f"Broken .*{bad!r}.*`{at}`.* 8.0"):
            call(policy, state, 1.0 if at == "foresee" else buoy.Seen(True), ops=PLAIN)


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_start_is_an_error(bad):
    """In every front end, before the first step."""
    policy = Broken(bad, "init")
    with pytest.raises(buoy.PolicyError, match="`init`"):
        initial(policy)
    with pytest.raises(buoy.PolicyError, match="`init`"):
        buoy.replay(Trace(amax_log2=(0.0,)), [policy])


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("backend", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("at", ["foresee", "update"])
def test_a_bad_scale_on_a_device_leaves_the_state(backend, bad, at):
    """Its other numbers are as doubtful; an infinite scale becomes the bound."""
    module = pytest.importorskip(f"buoy._backends.{backend}")
    policy = Broken(bad, at)
    state = buoy.lift(policy, policy.init(), backend)
    if at == "update":
        seen = buoy.Seen(module.lift(True))
        after = moved(policy, state, seen, ops=module.ops())
    else:
        after = foreseen(policy, state, module.lift(1.0), ops=module.ops())
    same_or_bound(after, bad)


@pytest.mark.parametrize("backend", ["plain", "numpy", "torch", "jax"])
def test_a_scale_beyond_the_bounds_becomes_the_bound(backend):
    """A rule without bounds is not wrong; 2^-24 is its floor."""

    @dataclass(frozen=True)
    class Endless(Broken):
        factor: float = 0.5

        def update(self, state, seen, *, ops=None):
            return replace(state, scale=state.scale * self.factor)

    policy = Endless(max_scale=2.0**50)
    for factor, bound in ((2.0**-10, 2.0**-24), (2.0**20, bounds_of(policy).high)):
        policy = replace(policy, factor=factor)
        state, ops, true = policy.init(), PLAIN, True
        if backend != "plain":
            module = pytest.importorskip(f"buoy._backends.{backend}")
            state, ops = buoy.lift(policy, state, backend), module.ops()
            true = module.lift(true)
        for _ in range(3 if bound < 1.0 else 4):
            state = moved(policy, state, buoy.Seen(true), ops=ops)
        assert bound == float(state.scale)


def test_the_bounds_are_the_policys_own():
    """A scale of another origin comes back within them."""
    policy = buoy.Backoff(min_scale=4.0, max_scale=64.0, init_scale=8.0)
    for scale, bound in ((1.0, 4.0), (1e9, 64.0)):
        state = replace(policy.init(), scale=scale)
        assert bound == moved(policy, state, buoy.Seen(True), ops=PLAIN).scale
    policy = buoy.Backoff(min_scale=1e-12)
    assert bounds_of(policy).low <= policy.constants.low < 1e-12
    fixed = buoy.Static(init_scale=2.0**-40)
    state = moved(fixed, fixed.init(), buoy.Seen(True), ops=PLAIN)
    assert state.scale == 2.0**-40


def test_a_computed_scale_is_kept_within_the_bounds_too():
    """A state whose scale is no field cannot be moved: it stays."""

    @dataclass(frozen=True)
    class Exponent:
        k: Any

        @property
        def scale(self):
            return 2.0**self.k

    @dataclass(frozen=True)
    class ByExponent(Broken):
        def init(self, *, scale=None):
            return Exponent(3.0)

        def update(self, state, seen, *, ops=None):
            return Exponent(state.k - 20.0)

    policy = ByExponent()
    state = moved(policy, policy.init(), buoy.Seen(True), ops=PLAIN)
    assert moved(policy, state, buoy.Seen(True), ops=PLAIN) == Exponent(-17.0)
    module = pytest.importorskip("buoy._backends.numpy")
    state = buoy.lift(policy, state, "numpy")
    seen = buoy.Seen(module.lift(True))
    assert moved(policy, state, seen, ops=module.ops()).k == -17.0


@pytest.mark.parametrize("backend", ["plain", "torch", "jax"])
def test_logmax_survives_gradients_of_zero(backend):
    """Zeros change nothing; the published rule itself is left with NaN for good."""
    policy = buoy.policy("openseq2seq_logmax")
    assert math.isnan(policy.update(policy.init(), ZEROS).scale)
    plain = policy.update(policy.init(), buoy.Seen(True, 2.0))
    with pytest.importorskip("jax").enable_x64(backend == "jax"):
        state, ops, events = policy.init(), PLAIN, [ZEROS, buoy.Seen(True, 2.0)]
        if backend != "plain":
            module = pytest.importorskip(f"buoy._backends.{backend}")
            state, ops = buoy.lift(policy, state, backend), module.ops()
            events = [map_state(module.lift, seen) for seen in events]
        state = moved(policy, state, events[0], ops=ops)
        assert (float(state.scale), float(state.mean)) == (policy.init().scale, 0.0)
        state = moved(policy, state, events[1], ops=ops)
        assert float(state.scale) == pytest.approx(plain.scale, rel=1e-6)


@pytest.mark.parametrize("name", buoy.policies())
def test_every_policy_stays_within_bounds(name):
    """Through zeros, overflows and NaN in every order, on plain numbers."""
    policy = buoy.policy(name)
    bounds, state = bounds_of(policy), policy.init()
    events = [ZEROS, buoy.Seen(False, math.inf), buoy.Seen(True, math.nan)]
    events += [buoy.Seen(True, 30.0), buoy.Seen(True, -30.0)]
    for i in range(600):
        seen = events[(i * i // 7 + i // 40) % len(events)]
        try:
            state = moved(policy, state, seen, ops=PLAIN)
        except buoy.ScaleCollapsedError as error:
            state = error.state
        assert bounds.low <= state.scale <= bounds.high


def test_replay_has_the_same_bounds():
    """A trace with a step of zeros is replayed to its end."""
    trace = Trace(amax_log2=(0.0, -math.inf, 0.0, 0.0))
    (result,) = buoy.replay(trace, ["openseq2seq_logmax"])
    assert (result.steps, result.skipped) == (4, 0)
    assert math.isfinite(result.final_scale)
    with pytest.raises(buoy.PolicyError, match="`update`"):
        buoy.replay(trace, [Broken()])


# -- the front ends --------------------------------------------------------------------


def one_step(scaler, weight, optimizer):
    """Take a step of gradients of 1."""
    optimizer.zero_grad()
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("at", ["foresee", "update"])
@pytest.mark.parametrize("road", ["host", "device"])
def test_torch_keeps_its_scale(bad, at, road, monkeypatch):
    """An error on the host, the old scale on a device; the weights stay finite."""
    torch = pytest.importorskip("torch")
    from buoy.torch import GradScaler

    if road == "device":
        monkeypatch.setattr("buoy._backends.torch.in_host_memory", lambda _: False)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.125)
    scaler = GradScaler("cpu", policy=Broken(bad, at))
    if road == "host":
        with pytest.raises(buoy.PolicyError, match=f"`{at}`"):
            one_step(scaler, weight, optimizer)
        assert scaler.get_scale() == 8.0
        return
    for _ in range(3):
        one_step(scaler, weight, optimizer)
        assert 0.0 < scaler.get_scale() < math.inf
    assert torch.isfinite(weight).all()
    if bad != math.inf:
        assert scaler.get_scale() == 8.0
        assert weight[0] == 1.0 - 3 * 0.125


@pytest.mark.slow
@pytest.mark.parametrize("bad", BAD)
def test_a_compiled_torch_step_keeps_its_scale(bad):
    """There is no host to raise on."""
    torch = pytest.importorskip("torch")
    from buoy.torch import GradScaler

    torch._dynamo.reset()
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.125)
    scaler = GradScaler("cpu", policy=Broken(bad), sync="never")

    @torch.compile(fullgraph=True, backend="eager")
    def scaled():
        return scaler.scale(weight.sum())

    @torch.compile(fullgraph=True, backend="eager")
    def finish():
        scaler.step(optimizer)
        scaler.update()

    for _ in range(2):
        optimizer.zero_grad()
        scaled().backward()
        finish()
    assert 0.0 < scaler.get_scale() < math.inf
    assert torch.isfinite(weight).all()


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("at", ["foresee", "update"])
def test_jax_keeps_its_scale(bad, at):
    """Under jit, over several steps."""
    jax = pytest.importorskip("jax")
    optax = pytest.importorskip("optax")
    from buoy.jax import last_step, loss_scaled, scale_of, value_and_grad

    tx = loss_scaled(optax.sgd(0.125), Broken(bad, at))
    weight = jax.numpy.ones(2)
    state = tx.init(weight)

    @jax.jit
    def step(weight, state):
        loss, grads = value_and_grad(lambda w: w.sum())(state, weight)
        updates, state = tx.update(grads, state, weight, value=loss)
        return optax.apply_updates(weight, updates), state

    for _ in range(3):
        weight, state = step(weight, state)
        assert 0.0 < float(scale_of(state)) < math.inf
        assert last_step(state).applied
    assert bad == math.inf or weight.tolist() == [1.0 - 3 * 0.125] * 2
    with pytest.raises(buoy.PolicyError, match="`init`"):
        loss_scaled(optax.sgd(0.125), Broken(bad, "init")).init(weight)
