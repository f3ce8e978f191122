"""Gradients that never carried the scale are reported, and those that do are not."""

import functools
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import buoy
from buoy.jax import BuoyWarning, Feed, last_step, loss_scaled, scale_of
from buoy.jax import value_and_grad as scaled_value_and_grad

NOTHING_READ = "Nothing in this process has read the scale"
_names = iter(range(10**6))


def fresh():
    """Make parameters of new names: reads are noted per policy and names."""
    return {f"w{next(_names)}": jnp.full(4, 2.0)}


def loss_of(params):
    return sum(jnp.sum(w**2) for w in params.values())


def plain(state, params):
    return jax.value_and_grad(loss_of)(params)


def own(state, params):
    loss, grads = jax.value_and_grad(lambda p: loss_of(p) * scale_of(state))(params)
    return loss / scale_of(state), grads


def step_of(tx, differentiate):
    def step(params, state):
        loss, grads = differentiate(state, params)
        updates, state = tx.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    return step


def scanned(step):
    def run(params, state):
        body = lambda carry, _: (step(*carry), None)  # noqa: E731
        return jax.lax.scan(body, (params, state), None, length=3)[0]

    return run


def mapped(step):
    spec = jax.sharding.PartitionSpec()
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )


ROADS = {"jit": jax.jit, "scan": scanned, "shard_map": mapped}


@pytest.mark.slow
@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("policy", ["headroom", "static"])
def test_plain_gradients_are_reported_at_the_first_step(road, policy):
    """While the step is traced, once, at the line that called."""
    options = {"axis_name": "i"} if road == "shard_map" else {}
    params = fresh()
    tx = loss_scaled(optax.MultiSteps(optax.sgd(0.1), 2), policy, **options)
    run = ROADS[road](step_of(tx, plain))
    with pytest.warns(BuoyWarning, match=f"{NOTHING_READ}.*buoy.jax.value_and_grad"):
        params, state = run(params, tx.init(params))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(params, state)


def test_plain_gradients_are_reported_outside_of_jit():
    """After a few: single ones may be made by hand."""
    params = fresh()
    tx = loss_scaled(optax.sgd(0.1))
    step, state = step_of(tx, plain), tx.init(params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(7):
            params, state = step(params, state)
    with pytest.warns(BuoyWarning, match=NOTHING_READ):
        step(params, state)


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("differentiate", [functools.partial, own])
def test_scaled_gradients_are_not(road, differentiate):
    """Neither ours nor those of a loss that was multiplied by hand."""
    if differentiate is functools.partial:
        differentiate = scaled_value_and_grad(loss_of)
    options = {"axis_name": "i"} if road == "shard_map" else {}
    params = fresh()
    tx = loss_scaled(optax.sgd(0.01), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, state = ROADS[road](step_of(tx, differentiate))(params, tx.init(params))
    assert last_step(state).applied


def test_gradients_of_another_compiled_function_are_not():
    """Several losses, accumulated, updated by a program of its own."""
    params = fresh()
    tx = loss_scaled(optax.sgd(0.01))
    state = tx.init(params)
    grad = jax.jit(lambda s, p: scaled_value_and_grad(loss_of)(s, p)[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grads = jax.tree.map(jnp.add, grad(state, params), grad(state, params))
        _, state = jax.jit(tx.update)(grads, state, params)
    assert last_step(state).applied


def test_no_scale_needs_no_scaling():
    """With a scale of 1 plain gradients are right."""
    params = fresh()
    tx = loss_scaled(optax.sgd(0.1), "none")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, state = jax.jit(step_of(tx, plain))(params, tx.init(params))
    assert last_step(state).applied


@pytest.mark.parametrize("policy", ["headroom", buoy.Backoff(growth_interval=1)])
def test_a_run_of_plain_gradients_is_stuck_at_the_ceiling(policy, tmp_path):
    """Whoever read the scale: it rises without end, and nothing is learned."""
    params = fresh()
    tx = loss_scaled(optax.sgd(0.1), policy)
    step, state = jax.jit(step_of(tx, plain)), tx.init(params)
    scale_of(state)
    found = []
    with buoy.trace.Recorder(tmp_path / "run.buoy") as recorder:
        feed = Feed(recorder, patience=20, on_stuck=found.append)
        for _ in range(1600):
            params, state = step(params, state)
            feed(state)
        feed.flush()
    (stuck,) = found
    assert "a scale of 2^64 or more" in str(stuck)
    assert "divided by a scale that they were never multiplied by" in str(stuck)
