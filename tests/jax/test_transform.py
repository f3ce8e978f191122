"""The transformation: unscale, check, clip and apply; or skip, and change nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import buoy
from buoy.jax import applied_of, last_step, loss_scaled, scale_of, value_and_grad
from buoy.jax.survey import measure, survey
from tests.jax.nets import batch_of, loss_fn, params_of, stepper


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_steps_equal_those_without_scaling(max_norm):
    """A scale is a power of two: unscaled and clipped, the update is the same."""
    clip = optax.identity() if max_norm is None else optax.clip_by_global_norm(max_norm)
    plain = optax.chain(clip, optax.adam(1e-2))
    tx = loss_scaled(optax.adam(1e-2), buoy.Static(init_scale=256.0), max_norm=max_norm)
    params = params_of()
    grads = jax.grad(loss_fn)(params, batch_of(0))
    expected, inner = plain.update(grads, plain.init(params), params)

    scaled = jax.tree.map(lambda g: g * 256.0, grads)
    actual, state = tx.update(scaled, tx.init(params), params)

    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert float(optax.tree.norm(grads)) == pytest.approx(last_step(state).norm)
    assert applied_of(state)
    del inner


@pytest.mark.parametrize("bad", [jnp.inf, -jnp.inf, jnp.nan])
@pytest.mark.parametrize("policy", ["backoff", "headroom", "none"])
def test_a_skipped_step_changes_nothing_but_the_scaler(bad, policy):
    """Weights and inner state stay as they were, to the bit; also negative zeros."""
    tx = loss_scaled(optax.adamw(1e-2), policy, max_norm=1.0)
    params = params_of()
    params["first"]["b"] = params["first"]["b"].at[0].set(-0.0)
    step = jax.jit(tx.update)
    grads = jax.tree.map(jnp.ones_like, params)
    _, state = step(grads, tx.init(params), params)
    grads["last"]["w"] = grads["last"]["w"].at[3, 0].set(bad)
    updates, after = step(grads, state, params)

    assert bits(params) == bits(optax.apply_updates(params, updates))
    assert bits(state.inner) == bits(after.inner)
    assert scale_of(after) <= scale_of(state)
    assert ("last.w",) == last_step(after).offenders
    assert not applied_of(after)


def test_a_run_with_overflows_ends_like_one_that_never_saw_them():
    """Bad batches leave no trace in the weights."""
    tx = loss_scaled(optax.adam(1e-2), buoy.Static(init_scale=2.0**8))
    step = stepper(tx)
    ends = []
    for poisoned in ({}, {3, 4, 9}):
        params, state = params_of(), tx.init(params_of())
        for i in range(12):
            if i in poisoned:
                params, state, _ = step(params, state, batch_of(i) * jnp.inf)
            params, state, _ = step(params, state, batch_of(i))
        ends.append(bits((params, state.inner)))

    assert ends[0] == ends[1]


@pytest.mark.slow
def test_nothing_is_compiled_twice():
    """Skipped, applied, first or hundredth: one compilation; and one for a scan."""
    for policy in ("headroom", "backoff", "deepspeed", "none"):
        with jax.enable_x64(buoy.policy(policy).precision == "float64"):
            tx = loss_scaled(optax.adam(1e-2), policy)
            step = stepper(tx)
            params, state = params_of(), tx.init(params_of())
            for i in range(20):
                x = batch_of(i, 1e6 if i % 5 == 3 else 1.0)
                params, state, _ = step(params, state, x)
            assert 1 == step._cache_size(), policy


@pytest.mark.slow
def test_steps_under_scan_equal_steps_under_jit():
    """The whole loop may be compiled: the state is a carry like any other."""
    tx = loss_scaled(optax.adam(1e-2), "headroom", max_norm=1.0)
    step = stepper(tx)
    xs = jnp.stack([batch_of(i, 1e5 if i % 7 == 3 else 1.0) for i in range(21)])
    params, state = params_of(), tx.init(params_of())
    scales = []
    for x in xs:
        params, state, _ = step(params, state, x)
        scales.append(float(scale_of(state)))

    def body(carry, x):
        params, state, _ = step(*carry, x)
        return (params, state), scale_of(state)

    start = (params_of(), tx.init(params_of()))
    (_, last), scanned = jax.jit(lambda: jax.lax.scan(body, start, xs))()

    assert scales == scanned.tolist()
    assert bits(state.scaling) == bits(last.scaling)


@pytest.mark.slow
def test_a_population_under_vmap_keeps_a_scale_each():
    """Independent models side by side do not touch each other's scale."""
    tx = loss_scaled(optax.sgd(0.1), "backoff")
    params = jnp.ones((3, 2))
    state = jax.vmap(tx.init)(params)
    grads = jnp.ones((3, 2)).at[1, 0].set(jnp.nan)
    _, state = jax.vmap(tx.update)(grads, state, params)

    assert [2.0**16, 2.0**15, 2.0**16] == scale_of(state).tolist()
    assert [True, False, True] == applied_of(state).tolist()
    second = jax.tree.map(lambda x: x[1], state)
    assert last_step(second).skipped
    with pytest.raises(buoy.jax.StructureError, match=r"3 models.*x\[0\]"):
        last_step(state)


def test_the_program_talks_to_no_host():
    """No callback, no infeed, no outfeed: nothing that would wait for Python."""
    tx = loss_scaled(optax.adam(1e-2), "headroom", max_norm=1.0)
    params = params_of()
    lowered = stepper(tx).lower(params, tx.init(params), batch_of(0))
    program = lowered.compile().as_text()

    for word in ("callback", "infeed", "outfeed", "send(", "recv("):
        assert word not in program
    assert "custom-call" not in lowered.as_text().replace("sharding", "")


def test_a_loop_reads_nothing_on_the_host(monkeypatch):
    """Fifty steps without a single array turned into a number."""
    from jax._src.array import ArrayImpl

    tx = loss_scaled(optax.adam(1e-2), "headroom", max_norm=1.0)
    step = stepper(tx)
    params, state = params_of(), tx.init(params_of())
    params, state, _ = step(params, state, batch_of(0))
    xs = [batch_of(i) for i in range(50)]
    read = []
    value = ArrayImpl._value
    monkeypatch.setattr(
        ArrayImpl, "_value", property(lambda a: (read.append(a), value.fget(a))[1])
    )
    for x in xs:
        params, state, _ = step(params, state, x)
    assert [] == read
    assert last_step(state).applied
    assert read  # the test can fail


def test_the_state_may_be_donated():
    """Buffers are reused: no array stands twice in the state."""
    tx = loss_scaled(optax.adam(1e-2), "headroom")
    params = params_of()
    state = tx.init(params)
    step = jax.jit(tx.update, donate_argnums=(1,))
    for _ in range(3):
        _, state = step(jax.tree.map(jnp.ones_like, params), state, params)

    assert 3 == int(state.steps)


@pytest.mark.parametrize(("scale", "size"), [(1.0, 1e30), (1024.0, 1e37), (0.5, 1e30)])
def test_large_finite_gradients_are_not_called_infinite(scale, size):
    """A sum of squares may overflow where no gradient does."""
    tx = loss_scaled(optax.sgd(1.0), buoy.Static(init_scale=scale), max_norm=1.0)
    grads = {"a": jnp.full(4, size), "b": jnp.full(5, size)}
    updates, state = tx.update(grads, tx.init(grads), grads)

    assert applied_of(state)
    assert last_step(state).norm == pytest.approx(3 * size / scale)
    np.testing.assert_allclose(updates["a"], -1 / 3, rtol=1e-6)


def test_a_norm_that_unscaling_makes_infinite_is_an_overflow_of_clipping():
    """Each gradient is finite, scaled and unscaled, and so is the scaled norm."""
    tx = loss_scaled(optax.sgd(1.0), buoy.Static(init_scale=0.25), max_norm=1.0)
    grads = jnp.full(9, 5e37)
    _, state = tx.update(grads, tx.init(grads), grads)

    assert not applied_of(state)


def test_the_norm_to_clip_by_may_be_computed():
    """A schedule, or `inject_hyperparams`, knows it only inside of jit."""

    def clipped(max_norm):
        tx = loss_scaled(optax.sgd(1.0), "static", max_norm=max_norm)
        return tx.update(jnp.full(4, 1024.0), tx.init(jnp.ones(4)))[0]

    np.testing.assert_allclose(jax.jit(clipped)(0.5), -0.25, rtol=1e-6)


def test_what_unscaling_makes_of_gradients_is_checked_too():
    """At a tiny scale a finite gradient becomes inf: it must not be applied."""
    tx = loss_scaled(optax.sgd(1.0), buoy.Static(init_scale=2.0**-100))
    grads = jnp.full(3, 1e15)
    updates, state = tx.update(grads, tx.init(grads), grads)

    assert not applied_of(state)
    assert not np.any(updates)


@pytest.mark.parametrize(
    "policy",
    [
        buoy.policy("apex", loss_scale=128.0),
        buoy.policy("tf_keras", dynamic=False, initial_scale=8.0),
    ],
)
def test_no_policy_has_a_step_applied_that_is_not_finite(policy):
    """Though the peers of these would: weights and state stay finite."""
    tx = loss_scaled(optax.sgd(1.0, momentum=0.9), policy)
    before = tx.init(jnp.ones(2))
    updates, state = tx.update(jnp.full(2, jnp.inf), before)

    assert not applied_of(state)
    assert not np.any(updates)
    jax.tree.map(np.testing.assert_array_equal, before.inner, state.inner)


def test_a_tree_without_leaves_is_a_step():
    """Nothing to train is nothing to fail on."""
    tx = loss_scaled(optax.sgd(1.0), "headroom", max_norm=1.0)
    updates, state = tx.update({"frozen": None}, tx.init({"frozen": None}))

    assert {"frozen": None} == updates
    assert last_step(state).applied


def test_every_kind_of_float_is_unscaled():
    """Complex, FP16, BF16 and empty leaves; FP16 comes out as float32."""
    params = {
        "complex": jnp.full(2, 1 + 2j, jnp.complex64),
        "half": jnp.ones(2, jnp.float16),
        "brain": jnp.ones(2, jnp.bfloat16),
        "empty": jnp.ones((0, 3)),
    }
    tx = loss_scaled(optax.sgd(1.0), buoy.Static(init_scale=4.0))
    with pytest.warns(buoy.jax.BuoyWarning, match="`half`.*master_weights"):
        state = tx.init(params)
    updates, state = tx.update(jax.tree.map(lambda p: 4 * p, params), state, params)

    assert applied_of(state)
    assert jnp.float32 == updates["half"].dtype
    assert jnp.bfloat16 == updates["brain"].dtype
    assert [-1, -1] == updates["half"].tolist() == updates["brain"].tolist()
    assert [-1 - 2j] * 2 == updates["complex"].tolist()


def test_bf16_gradients_are_clipped_in_float32():
    """A clip factor in BF16 would have an error of up to 1/512 of its own."""
    tx = loss_scaled(optax.sgd(1.0), buoy.Static(init_scale=4.0), max_norm=1.0)
    grads = jnp.arange(1, 33, dtype=jnp.bfloat16)
    updates, _ = tx.update(4 * grads, tx.init(grads), grads)

    wide = grads.astype(jnp.float32)
    clipped = (wide / jnp.linalg.norm(wide)).astype(jnp.bfloat16)
    assert (-clipped).tolist() == updates.tolist()


def test_inner_state_of_half_parameters_is_float32():
    """The second moment of a small gradient does not fit into FP16."""
    tx = loss_scaled(optax.adam(1e-3), "static")
    params = jnp.ones(2, jnp.float16)
    with pytest.warns(buoy.jax.BuoyWarning):
        state = tx.init(params)
    _, after = tx.update(jnp.full(2, 1e-3, jnp.float16), state, params)

    kinds = {x.dtype for x in jax.tree.leaves(after.inner)}
    assert jnp.float16 not in kinds
    assert 0 < after.inner[0].nu[0] < 1e-12


@pytest.mark.parametrize("compiled", [True, False])
def test_a_norm_beyond_float32_is_no_step_of_zeros(compiled):
    """Every gradient is finite; clipped by an infinite norm, all would be zero."""
    tx = loss_scaled(optax.sgd(1.0), "backoff", max_norm=1.0)
    update = jax.jit(tx.update) if compiled else tx.update
    params = jnp.zeros(100)
    updates, state = update(jnp.full(100, 2e38), tx.init(params), params)
    assert last_step(state).skipped
    assert scale_of(state) == 2.0**15
    updates, state = update(jnp.full(100, 2e36), state, params)
    assert last_step(state).applied
    assert np.all(np.asarray(updates) < -0.09)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_norm_beyond_float32_matters_only_to_clipping(compiled):
    """Without clipping, finite gradients are applied, as in PyTorch."""
    tx = loss_scaled(optax.sgd(1.0), "backoff")
    update = jax.jit(tx.update) if compiled else tx.update
    params = jnp.zeros(100)
    updates, state = update(jnp.full(100, 2e38), tx.init(params), params)
    assert last_step(state).applied
    assert np.all(np.asarray(updates) == -np.float32(2e38) / 2.0**16)


@given(
    st.lists(
        st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=2, max_size=5
    ),
    st.integers(-100, 100),
)
@settings(max_examples=150)
def test_the_short_look_and_the_long_one_see_the_same(numbers, exponent):
    """With and without a branch: the same culprits, and the same norm where finite."""
    leaves = [jnp.array(numbers, jnp.float32), jnp.array(numbers[::-1], jnp.float32)]
    inverse = jnp.float32(2.0**exponent)
    short, long = (SURVEYS[branch](leaves, inverse) for branch in (True, False))
    exact = np.linalg.norm(np.array(numbers * 2, np.float64))

    assert short.bad.tolist() == long.bad.tolist()
    assert short.amax.tolist() == long.amax.tolist() or np.isnan(short.amax)
    with np.errstate(all="ignore"):
        unscaled = np.abs(np.float32(numbers) * np.float32(inverse))
    fine = np.all(np.isfinite(numbers)) and np.all(np.isfinite(unscaled))
    assert fine == (not short.bad[0])
    if 1e-15 < exact < 1e15:
        np.testing.assert_allclose([short.norm, long.norm], exact, rtol=1e-5)


SURVEYS = {
    branch: jax.jit(
        lambda leaves, inverse, branch=branch: survey(
            leaves, inverse, amax=True, branch=branch
        )
    )
    for branch in (True, False)
}


def test_underflow_is_the_share_of_small_among_nonzero():
    """Zeros do not count, and neither does a step whose turn it is not."""
    leaves = [jnp.array([0.0, 1.0, 2.0**-21]), jnp.array([-(2.0**-30), 3.0])]
    for branch in (True, False):
        for steps, expected in ((15, 0.5), (16, np.nan)):
            found = measure(
                leaves,
                jnp.array(1.0),
                jnp.array(steps),
                frozenset({"underflow"}),
                branch=branch,
            )

            np.testing.assert_equal(expected, float(found["underflow"]))


@pytest.mark.slow
def test_training_in_fp16_needs_a_scale():
    """Gradients that FP16 loses are there with a scale: it alone lets the loss fall."""

    def tiny(params, x):
        return loss_fn(params, x) * 1e-8

    ends = {}
    for policy in ("headroom", "backoff", "none"):
        tx = loss_scaled(optax.sgd(1e6), policy)
        step = stepper(tx, tiny)
        params, state = params_of(), tx.init(params_of())
        for i in range(60):
            params, state, _ = step(params, state, batch_of(i % 4))
        ends[policy] = float(loss_fn(params, batch_of(0)))

    assert ends["headroom"] < 0.8 * ends["none"]
    assert ends["backoff"] < 0.8 * ends["none"]


def test_value_and_grad_is_what_update_takes_back():
    """At any scale of the policy, scaled and unscaled gradients are the same ones."""
    params, x = params_of(), batch_of(0)
    expected = jax.grad(lambda p: jnp.sum(p["last"]["w"] ** 2) + 0 * loss_fn(p, x))(
        params
    )
    tx = loss_scaled(optax.sgd(1.0), buoy.Static(init_scale=2.0**11))
    state = tx.init(params)
    _, grads = value_and_grad(
        lambda p: jnp.sum(p["last"]["w"] ** 2) + 0 * loss_fn(p, x)
    )(state, params)
    updates, _ = tx.update(grads, state, params)

    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(updates), strict=True):
        np.testing.assert_array_equal(a, -b)
