"""A policy that wants it is told whether the loss was finite before it was scaled."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import buoy
from buoy.jax import last_step, loss_scaled, value_and_grad
from tests.told import FINITE, NOT_FINITE, UNKNOWN, Told

BAD = [np.nan, np.inf, -np.inf]
PARAMS = {"w": jnp.ones(3)}


def told_of(tx, *losses, grads=None):
    """Take a step for each loss, compiled; return what was told of them."""
    grads = {"w": jnp.full(3, 1024.0)} if grads is None else grads
    update = jax.jit(lambda s, loss: tx.update(grads, s, PARAMS, value=loss)[1])
    state, told = tx.init(PARAMS), []
    for loss in losses:
        state = update(state, loss)
        told.append(float(state.scaling.told))
    return told


@pytest.mark.parametrize("bad", BAD)
def test_a_loss_that_is_not_finite_is_told_of_its_step_only(bad):
    tx = loss_scaled(optax.sgd(0.1), Told())

    told = told_of(tx, jnp.float32(0.5), jnp.float32(bad), jnp.float32(0.5))

    assert told == [FINITE, NOT_FINITE, FINITE]


def test_finite_losses_are_told_as_such_whatever_the_gradients():
    """An overflow of the backward pass says nothing of the loss."""
    tx = loss_scaled(optax.sgd(0.1), Told())
    grads = {"w": jnp.full(3, jnp.nan)}

    assert told_of(tx, jnp.float32(3e38), grads=grads) == [FINITE]


def test_without_a_loss_nothing_is_told():
    tx = loss_scaled(optax.sgd(0.1), Told())

    _, state = tx.update({"w": jnp.ones(3)}, tx.init(PARAMS), PARAMS)

    assert float(state.scaling.told) == UNKNOWN


def test_one_bad_loss_among_several_counts():
    """Losses may be passed as an array, e.g. one for each example."""
    tx = loss_scaled(optax.sgd(0.1), Told())

    assert told_of(tx, jnp.asarray([1.0, jnp.nan, 2.0])) == [NOT_FINITE]


def test_a_training_step_tells_of_the_unscaled_loss():
    """A loss that would overflow float32 if it were multiplied by the scale."""
    tx = loss_scaled(optax.sgd(0.0), Told(), max_norm=1.0)

    @jax.jit
    def step(params, state, x):
        loss_fn = lambda params: jnp.mean(params["w"]) * x  # noqa: E731
        loss, grads = value_and_grad(loss_fn)(state, params)
        return tx.update(grads, state, params, value=loss)[1]

    state = step(PARAMS, tx.init(PARAMS), 3e38)
    assert float(state.scaling.told) == FINITE
    state = step(PARAMS, state, jnp.inf)
    assert float(state.scaling.told) == NOT_FINITE
    assert last_step(state).verdict == "forward_nonfinite"


def test_accumulation_tells_of_every_micro_batch():
    """Inside `loss_scaled`, each one of `MultiSteps` is a step of the policy."""
    tx = loss_scaled(optax.MultiSteps(optax.sgd(0.1), 2), Told())

    told = told_of(tx, jnp.float32(0.5), jnp.float32(jnp.nan), jnp.float32(0.5))

    assert told == [FINITE, NOT_FINITE, FINITE]


def compiled_text(policy):
    """Return the program of a step, as XLA compiles it."""
    tx = loss_scaled(optax.adam(1e-3), policy, max_norm=1.0)

    def step(params, state, x):
        loss_fn = lambda params: jnp.sum(params["w"] * x)  # noqa: E731
        loss, grads = value_and_grad(loss_fn)(state, params)
        return tx.update(grads, state, params, value=loss)

    return jax.jit(step).lower(PARAMS, tx.init(PARAMS), 1.0).compile().as_text()


def test_who_does_not_want_it_has_no_instruction_for_it():
    """The only difference between the two programs is the test of the loss."""
    asked = compiled_text(Told()).count("is-finite")

    assert compiled_text(Told(wants=frozenset())).count("is-finite") == asked - 1
    assert compiled_text(buoy.Static()).count("is-finite") == asked - 1
