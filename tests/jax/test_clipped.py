"""Clipping before `loss_scaled`: the scale of policies that follow sizes is held."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import buoy
from buoy.jax import loss_scaled, scale_of, value_and_grad

START = {"w": jnp.full(4, 0.5)}
TARGET = jnp.arange(4.0)
CLIPPING = {
    "norm": optax.clip_by_global_norm(1.0),
    "value": optax.clip(0.125),
    "normalized": optax.chain(optax.identity(), optax.clip_by_global_norm(0.3)),
}


def loss_fn(params, factor):
    return factor * jnp.mean((params["w"] - TARGET) ** 2)


def scales_of(tx, steps=20, bad=()):
    """Train; return log2 of the scale after each step.  Gradients of `bad` are NaN."""

    @jax.jit
    def step(params, state, factor):
        _, grads = value_and_grad(loss_fn)(state, params, factor)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state, scales = START, tx.init(START), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tests/jax/test_nesting.py has the warning
        for i in range(steps):
            factor = jnp.inf if i in bad else 1.0 + i / 64
            params, state = step(params, state, factor)
            scales.append(float(np.log2(scale_of(state))))
    return scales


def scaled(policy="headroom"):
    return loss_scaled(optax.sgd(0.1), policy)


@pytest.mark.parametrize("kind", CLIPPING)
def test_the_scale_stays_from_the_third_clipped_step_on(kind):
    scales = scales_of(optax.chain(CLIPPING[kind], scaled()))

    assert scales[2] < 40
    assert scales[2:] == [scales[2]] * 18


def test_the_scale_falls_after_an_overflow_and_stays_there():
    """It is known from steps before the overflow."""
    scales = scales_of(optax.chain(CLIPPING["norm"], scaled()), bad={10, 11})

    assert scales[9] > scales[10] > scales[11]
    assert scales[11:] == [scales[11]] * 9


@pytest.mark.parametrize("policy", ["backoff", "torch", buoy.Static()])
def test_policies_that_do_not_follow_sizes_are_not_held(policy):
    """They never look at the gradients: the mistake does not change their scale."""
    wrong = scales_of(optax.chain(CLIPPING["norm"], scaled(policy)))

    assert wrong == scales_of(scaled(policy))


def test_honest_gradients_behind_another_transformation_are_not_held():
    """Their sizes differ from step to step."""
    wrong = scales_of(optax.chain(optax.trace(0.0), scaled()))

    assert wrong == scales_of(scaled())


def test_constant_gradients_are_not_held_where_nothing_stands_before():
    """Of a linear loss, say; nothing is compared there."""
    tx = loss_scaled(optax.sgd(0.1), "headroom")
    state = tx.init(START)
    for _ in range(4):
        grads = {"w": jnp.full(4, 1e-6) * scale_of(state)}
        _, state = tx.update(grads, state, START)

    assert scale_of(state) > 2.0**20
