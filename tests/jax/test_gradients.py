"""`value_and_grad`: the loss as it is, the gradients times the scale."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import buoy
from buoy.jax import applied_of, last_step, loss_scaled, scale_of, value_and_grad
from tests.jax.nets import batch_of, params_of, stepper


def state_of(params, policy="static", **options):
    return loss_scaled(optax.sgd(0.1), policy, **options).init(params)


def test_everything_that_jax_value_and_grad_hands_back():
    """Loss and aux untouched, the chosen arguments' gradients, keywords passed on."""

    def fun(w, x, *, plus):
        return jnp.sum(w * x) + plus, {"seen": x}

    w, x = jnp.arange(3.0), jnp.array([1.0, 2.0, 4.0])
    state = state_of(w)
    (loss, aux), grads = value_and_grad(fun, has_aux=True)(state, w, x, plus=5.0)
    assert 15.0 == loss
    assert x.tolist() == aux["seen"].tolist()
    assert [1024.0, 2048.0, 4096.0] == grads.tolist()

    for argnums in ((0, 1), [0, 1]):
        _, (both_w, both_x) = value_and_grad(fun, argnums, has_aux=True)(
            state, w, x, plus=5.0
        )
        assert grads.tolist() == both_w.tolist()
        assert (1024.0 * w).tolist() == both_x.tolist()


@pytest.mark.parametrize("policy", ["static", "headroom"])
def test_integers_may_be_asked_for(policy):
    """With JAX's own `allow_int` they have a gradient of no size."""
    state = state_of(jnp.ones(2), policy)
    params = {"w": jnp.ones(2), "n": jnp.arange(3)}
    grad_fn = value_and_grad(lambda p: jnp.sum(p["w"]), allow_int=True)
    _, grads = grad_fn(state, params)

    assert jax.dtypes.float0 == grads["n"].dtype
    assert [float(scale_of(state))] * 2 == grads["w"].tolist()


def test_an_fp16_loss_does_not_overflow_by_being_scaled():
    """flax multiplies it, and loses the first step: 65536 is inf in FP16."""
    w = jnp.ones(4, jnp.float16)
    state = state_of(w.astype(jnp.float32), buoy.Static(init_scale=2.0**20))

    def half(w):
        return jnp.mean(w * jnp.float16(1e-3))

    loss, grads = value_and_grad(half)(state, w)

    assert jnp.float16 == loss.dtype
    assert half(w) == loss
    assert jnp.float32 == grads.dtype
    np.testing.assert_allclose(grads, 2.0**20 * 1e-3 / 4, rtol=1e-3)


def test_gradients_of_fp16_parameters_come_as_float32():
    """So that they may be added up, and carry more than 65504."""
    w = {"half": jnp.ones(2, jnp.float16), "brain": jnp.ones(2, jnp.bfloat16)}
    state = state_of({"w": jnp.ones(2)})
    _, grads = value_and_grad(
        lambda w: sum(jnp.sum(x.astype(jnp.float32)) for x in w.values())
    )(state, w)

    assert jnp.float32 == grads["half"].dtype
    assert jnp.bfloat16 == grads["brain"].dtype


def test_a_loss_that_jumps_is_foreseen():
    """The wrapper lowers the scale of the very backward pass that would overflow."""
    outcome = {}
    for policy in ("loss_ahead", "backoff"):
        tx = loss_scaled(optax.sgd(1e-3), policy, max_norm=1.0)
        step = stepper(tx, squares)
        params, state = params_of(), tx.init(params_of())
        for i in range(40):
            params, state, _ = step(params, state, batch_of(i))
        before = float(scale_of(state))
        params, state, _ = step(params, state, batch_of(40, 300.0))
        outcome[policy] = last_step(state)
        assert applied_of(state) == (policy == "loss_ahead")
        if policy == "loss_ahead":
            assert outcome[policy].scale < before / 16

    assert outcome["loss_ahead"].norm > 100


def squares(params, x):
    half = x.astype(jnp.float16)
    out = half @ params["first"]["w"].astype(jnp.float16)
    return jnp.mean(jnp.square(out.astype(jnp.float32)))


def test_gradients_carry_the_planned_scale_even_if_a_lower_one_was_foreseen():
    """Whoever adds up or inspects them divides by `scale_of`, and is right."""
    tx = loss_scaled(optax.sgd(1e-3), "loss_ahead")
    step = stepper(tx, squares)
    params, state = params_of(), tx.init(params_of())
    for i in range(20):
        params, state, _ = step(params, state, batch_of(i))
    x = batch_of(20, 64.0)
    _, grads = jax.jit(value_and_grad(squares))(state, params, x)
    expected = jax.grad(lambda p: jnp.mean(jnp.square(x @ p["first"]["w"])))(params)

    found = grads["first"]["w"] / scale_of(state)
    np.testing.assert_allclose(found, expected["first"]["w"], rtol=2e-2, atol=1.0)


@pytest.mark.slow
def test_without_the_loss_nothing_is_foreseen_and_nothing_is_wrong():
    """`update` without `value=` costs foresight alone."""
    tx = loss_scaled(optax.sgd(1e-3), "loss_ahead")
    params = params_of()
    state = tx.init(params)
    for i in range(6):
        loss, grads = jax.jit(value_and_grad(squares))(state, params, batch_of(i))
        expected = jax.tree.map(lambda g: -1e-3 * g, grads)
        scale = scale_of(state)
        updates, state = jax.jit(tx.update)(grads, state, params)
        np.testing.assert_allclose(
            updates["first"]["w"], expected["first"]["w"] / scale, rtol=1e-6
        )
        assert loss == jax.jit(squares)(params, batch_of(i))
    assert last_step(state).loss is None


def test_second_derivatives_and_checkpointing_compose():
    """The scale enters as a factor of the derivative: all of JAX still applies."""
    state = state_of(jnp.ones(2))

    @jax.checkpoint
    def cube(w):
        return jnp.sum(w**3)

    _, grads = value_and_grad(cube)(state, jnp.ones(2))
    assert [3072.0, 3072.0] == grads.tolist()

    def penalty(w):
        return jnp.sum(jax.grad(cube)(w) ** 2)

    _, grads = value_and_grad(penalty)(state, jnp.ones(2))
    assert [36 * 1024.0] * 2 == grads.tolist()


@pytest.mark.parametrize("policy", ["headroom", "static"])
def test_scale_of_needs_no_device(policy):
    """It is a field of the state: an array, under jit too."""
    state = state_of(jnp.ones(2), policy)

    assert isinstance(scale_of(state), jax.Array)
    assert float(scale_of(state)) == float(jax.jit(scale_of)(state))
