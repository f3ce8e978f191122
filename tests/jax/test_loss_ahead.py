"""`LossAhead` in `loss_scaled`, and what a policy costs that does not look ahead."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import buoy
from buoy import LossAhead
from buoy.jax import last_step, loss_scaled, scale_of, value_and_grad
from tests.jax.nets import batch_of, loss_fn, params_of


def half(params, size):
    """A loss whose gradient, in FP16, is the size times the scale."""
    return jnp.sum((params["w"].astype(jnp.float16) * size).astype(jnp.float32))


def stepper(tx):
    """Take a step that changes no weights; return the state and its outcome."""

    @jax.jit
    def step(state, size):
        params = {"w": jnp.ones(4)}
        value, grads = value_and_grad(half)(state, params, size.astype(jnp.float16))
        _, state = tx.update(grads, state, params, value=value)
        return state

    return step


SIZES = [1.0, 1.0, 1.0, 1024.0, 1.0]


def test_a_batch_that_jumps_is_applied_at_a_lower_scale():
    """1024 x in loss and gradients, which FP16 could not hold at the usual scale."""
    static = buoy.Static(init_scale=2.0**12)
    for policy, used, applied in (
        (static, 12.0, False),
        (LossAhead(static), 2.0, True),
    ):
        tx = loss_scaled(optax.identity(), policy)
        step, state = stepper(tx), tx.init({"w": jnp.ones(4)})
        for size in SIZES[:4]:
            state = step(state, jnp.float32(size))
        last = last_step(state)

        assert (2.0**used, applied) == (last.scale, last.applied)
        assert 2.0**12 == scale_of(state)


@pytest.mark.parametrize("inside", ["headroom", "backoff"])
def test_a_run_goes_on_as_if_it_had_not_been_saved(inside):
    """From its leaves, as checkpoints keep them, under `scan` and step by step."""
    tx = loss_scaled(optax.identity(), LossAhead(inside))
    step, fresh = stepper(tx), tx.init({"w": jnp.ones(4)})
    sizes = jnp.asarray(SIZES * 4)

    def body(state, size):
        state = step(state, size)
        return state, scale_of(state)

    whole, scales = jax.lax.scan(body, fresh, sizes)
    state = fresh
    for i, size in enumerate(sizes):
        if i == 7:
            kept = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
            state = jax.tree.unflatten(jax.tree.structure(fresh), kept)
        state = step(state, size)
        assert scales[i] == scale_of(state)
    for one, other in zip(*map(jax.tree.leaves, (whole, state)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_flax_saves_the_state_inside():
    """Field by field, as the rest."""
    serialization = pytest.importorskip("flax.serialization")
    tx = loss_scaled(optax.identity(), "loss_ahead")
    step, fresh = stepper(tx), tx.init({"w": jnp.ones(4)})
    state = functools.reduce(step, map(jnp.float32, SIZES), fresh)
    again = serialization.from_bytes(fresh, serialization.to_bytes(state))

    for one, other in zip(*map(jax.tree.leaves, (state, again)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_damaged_state_is_named_to_the_last_field():
    """Also inside the wrapper."""
    tx = loss_scaled(optax.identity(), LossAhead("backoff"))
    grads = {"w": jnp.ones(4)}
    state = tx.init(grads)
    inner = replace(state.scaling.inner, scale=jnp.ones(3))
    damaged = replace(state, scaling=replace(state.scaling, inner=inner))
    with pytest.raises(buoy.BuoyError, match=r"scaling\.inner\.scale"):
        tx.update(grads, damaged)


def by_hand(state, params, x):
    """Write loss scaling out."""
    loss, back = jax.vjp(lambda p: loss_fn(p, x), params)
    return loss, back(scale_of(state))[0]


def program_of(policy, run, *, devices=False):
    """Trace a loss and its gradients; return the program as text."""
    tx = loss_scaled(optax.identity(), policy, axis_name="d" if devices else None)
    params = params_of()
    if devices:
        mesh = Mesh(np.array(jax.devices()[:1]), ("d",))
        specs = {"in_specs": (P(), P(), P("d")), "out_specs": (P(), P())}
        run = jax.shard_map(run, mesh=mesh, check_vma=False, **specs)
    return str(jax.make_jaxpr(run)(tx.init(params), params, batch_of(0)))


LOOKS = pytest.mark.parametrize(
    ("policy", "looks"), [("static", False), ("backoff", False), ("loss_ahead", True)]
)


@LOOKS
def test_a_policy_that_does_not_look_ahead_costs_nothing_before_backward(policy, looks):
    """The program is what one writes by hand; the scale is bounded, and times 1."""
    ours = program_of(policy, value_and_grad(loss_fn)).count(" = ")
    plain = program_of(policy, by_hand).count(" = ")

    assert looks == (ours > plain + 2)


@LOOKS
def test_devices_exchange_the_loss_only_for_a_policy_that_looks_ahead(policy, looks):
    """In a collective between forward and backward pass."""
    program = program_of(policy, value_and_grad(loss_fn), devices=True)

    assert looks == ("pmax" in program)
