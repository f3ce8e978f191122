"""Every library's own way of writing a step works as it stands."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

import buoy
from buoy.jax import (
    applied_of,
    cast,
    last_step,
    loss_scaled,
    scale_of,
    value_and_grad,
)
from tests.jax.nets import batch_of, loss_fn, params_of, stepper

X, Y = batch_of(0), batch_of(1)[:, :1]
TX = loss_scaled(optax.adam(3e-2), "loss_ahead", max_norm=1.0)


def squares(out):
    return jnp.mean(jnp.square(out.astype(jnp.float32) - Y))


def assert_learns(losses, state, skipped):
    """Half of the loss is gone, and the step fed with inf was skipped."""
    assert losses[-1] < 0.5 * losses[0]
    assert 1 == skipped
    assert scale_of(state) > 1


@pytest.mark.slow
def test_flax_linen_train_state():
    """`apply_gradients` as ever; the scale is found in the TrainState."""
    model = linen.Sequential([linen.Dense(8, dtype=jnp.float16), linen.Dense(1)])
    params = model.init(jax.random.key(0), X)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=TX)

    @jax.jit
    def step(state, x):
        def loss(params):
            return squares(state.apply_fn(params, x))

        loss, grads = value_and_grad(loss)(state, state.params)
        return state.apply_gradients(grads=grads), loss

    losses, skipped = [], 0
    for i in range(60):
        state, loss = step(state, X * jnp.inf if i == 5 else X)
        losses.append(float(loss))
        skipped += not applied_of(state)
    assert_learns(losses, state, skipped)


class Seeing(TrainState):
    """A TrainState that hands the loss on, and counts the steps that were applied."""

    def apply_gradients(self, *, grads, value, **kwargs):
        updates, opt_state = self.tx.update(
            grads, self.opt_state, self.params, value=value
        )
        return self.replace(
            step=jnp.where(applied_of(opt_state), self.step + 1, self.step),
            params=optax.apply_updates(self.params, updates),
            opt_state=opt_state,
            **kwargs,
        )


def test_a_train_state_that_sees_the_loss():
    """As the guide shows it: the policy looks ahead, and skips do not count."""
    params = {"w": jnp.ones((8, 1))}
    tx = loss_scaled(optax.adam(3e-2), buoy.LossAhead("headroom"), max_norm=1.0)
    state = Seeing.create(apply_fn=None, params=params, tx=tx)

    @jax.jit
    def step(state, x):
        def loss(params):
            return squares(x.astype("float16") @ params["w"].astype("float16"))

        value, grads = value_and_grad(loss)(state, state.params)
        return state.apply_gradients(grads=grads, value=value)

    told = []
    for x in [X] * 4 + [X * 1e3] + [X * jnp.inf]:
        state = step(state, x)
        told.append(last_step(state))

    assert [True] * 5 + [False] == [one.applied for one in told]
    assert told[4].scale < told[3].next_scale  # the jump was foreseen, not skipped
    assert "forward_nonfinite" == told[5].verdict
    assert 5 == int(state.step)
    assert step._cache_size() <= 2  # flax starts from a plain 0


@pytest.mark.slow
@pytest.mark.parametrize("transform", [nnx.value_and_grad])
def test_flax_nnx_optimizer(transform):
    """The optimizer's variables hold the state; `nnx.jit` carries them."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.one = nnx.Linear(8, 8, dtype=jnp.float16, rngs=rngs)
            self.two = nnx.Linear(8, 1, rngs=rngs)
            self.calls = nnx.Variable(jnp.array(0))

        def __call__(self, x):
            return self.two(self.one(x))

    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        grad_fn = value_and_grad(lambda m: squares(m(x)), transform=transform)
        loss, grads = grad_fn(optimizer, model)
        optimizer.update(model, grads, value=loss)
        return loss

    losses, skipped = [], 0
    for i in range(60):
        losses.append(float(step(model, optimizer, X * jnp.inf if i == 5 else X)))
        skipped += not applied_of(optimizer)
    assert_learns(losses, optimizer, skipped)
    assert last_step(optimizer).applied
    assert 0.0 < last_step(optimizer).loss < 1.0


@pytest.mark.slow
def test_equinox():
    """Filtered transformations pass through; what is static stays."""
    model = eqx.nn.MLP(8, 1, 8, 1, key=jax.random.key(0))
    state = TX.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, state, x):
        def loss(model):
            return squares(jax.vmap(cast(model, "float16"))(x.astype(jnp.float16)))

        grad_fn = value_and_grad(loss, transform=eqx.filter_value_and_grad)
        value, grads = grad_fn(state, model)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, state = TX.update(grads, state, params, value=value)
        return eqx.apply_updates(model, updates), state, value

    losses, skipped = [], 0
    for i in range(60):
        model, state, loss = step(model, state, X * jnp.inf if i == 5 else X)
        losses.append(float(loss))
        skipped += not applied_of(state)
    assert_learns(losses, state, skipped)


def test_accumulation_leaves_out_the_bad_micro_batch_alone():
    """Inside `loss_scaled`, MultiSteps never sees a non-finite gradient."""
    static = buoy.Static(init_scale=256.0)
    tx = loss_scaled(optax.MultiSteps(optax.sgd(0.1), 2), static)
    step = stepper(tx)
    ends = []
    for bad in ((), (0, 2, 3)):
        params, state = params_of(), tx.init(params_of())
        for i in range(4):
            if i in bad:
                params, state, _ = step(params, state, batch_of(i) * jnp.nan)
            params, state, _ = step(params, state, batch_of(i))
        ends.append(params)

    jax.tree.map(np.testing.assert_array_equal, *ends)
    assert np.any(ends[0]["last"]["w"] != params_of()["last"]["w"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`loss_scaled` is number")  # harmless here
@pytest.mark.parametrize("where", range(3))
def test_a_chain_in_any_position(where):
    """The state is found; the others are linear, so the step is right."""
    parts = [optax.scale(2.0), optax.scale(0.5)]
    parts.insert(where, loss_scaled(optax.sgd(0.1), buoy.Static(init_scale=64.0)))
    tx = optax.chain(*parts)
    params = params_of()
    state = tx.init(params)
    loss, grads = value_and_grad(loss_fn)(state, params, X)
    updates, state = tx.update(grads, state, params, value=loss)
    expected = jax.tree.map(lambda g: -0.1 * g / 64.0, grads)

    assert 64.0 == scale_of(state)
    assert last_step(state).applied
    np.testing.assert_allclose(updates["first"]["w"], expected["first"]["w"], rtol=1e-6)


def test_optax_wrappers_around_it():
    """Masks, injected hyper-parameters and partitions keep the state findable."""
    params = {"trained": jnp.ones(2), "frozen": jnp.ones(2)}
    labels = {"trained": "yes", "frozen": "no"}
    tx = optax.partition(
        {"yes": loss_scaled(optax.sgd(0.1), "static"), "no": optax.set_to_zero()},
        labels,
    )
    state = tx.init(params)
    updates, state = jax.jit(tx.update)(
        {"trained": jnp.full(2, 1024.0), "frozen": jnp.ones(2)}, state, params
    )

    assert 1024.0 == scale_of(state)
    np.testing.assert_allclose(updates["trained"], -0.1, rtol=1e-6)
    assert not np.any(updates["frozen"])


@pytest.mark.slow
def test_injected_learning_rates_inside():
    """`inject_hyperparams` has weakly typed numbers in its state: they are kept."""
    tx = loss_scaled(optax.inject_hyperparams(optax.adam)(learning_rate=1e-2))
    params = params_of()
    step = stepper(tx)
    state = tx.init(params)
    for i in range(3):
        params, state, _ = step(params, state, batch_of(i))

    assert last_step(state).applied
    assert 0.01 == pytest.approx(float(state.inner.hyperparams["learning_rate"]))
