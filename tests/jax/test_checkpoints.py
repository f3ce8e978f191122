"""A state goes through every library's checkpoints, and the run goes on to the bit."""

import equinox as eqx
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training.train_state import TrainState

from buoy.jax import (
    LossScaledState,
    StructureError,
    last_step,
    loss_scaled,
    master_weights,
    scale_of,
)
from tests.jax.nets import batch_of, params_of, stepper


def through_orbax(held, fresh, folder):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "at", held)
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder / "at", fresh)


def through_flax(held, fresh, folder):
    (folder / "at").write_bytes(flax.serialization.to_bytes(held))
    return flax.serialization.from_bytes(fresh, (folder / "at").read_bytes())


def through_equinox(held, fresh, folder):
    eqx.tree_serialise_leaves(folder / "at", held)
    return eqx.tree_deserialise_leaves(folder / "at", fresh)


@pytest.mark.slow
@pytest.mark.parametrize("way", [through_orbax, through_flax, through_equinox])
@pytest.mark.parametrize("policy", ["headroom", "megatron"])
def test_a_run_resumes_to_the_bit(policy, way, tmp_path):
    """Stop after any step, restore, and the rest is the same."""
    tx, step = made(policy)
    params, state = params_of(), tx.init(params_of())
    for i in range(8):
        params, state, _ = step(params, state, batch_of(i, 1e5 if i in {2, 5} else 1.0))
        if i == 3:
            held = (params, state)
    fresh = (params_of(1), tx.init(params_of(1)))
    again, resumed = way(held, fresh, tmp_path)
    assert isinstance(resumed, LossScaledState)
    for i in range(4, 8):
        size = 1e5 if i == 5 else 1.0
        again, resumed, _ = step(again, resumed, batch_of(i, size))

    jax.tree.map(np.testing.assert_array_equal, (params, state), (again, resumed))
    assert last_step(state) == last_step(resumed)


def made(policy, cache={}):  # noqa: B006 - compiled once for all three
    if policy not in cache:
        tx = loss_scaled(optax.adam(1e-2), policy, max_norm=1.0)
        cache[policy] = (tx, stepper(tx))
    return cache[policy]


@pytest.mark.slow
def test_a_train_state_goes_through_bytes():
    """With masters and a chain around: what flax's own examples save."""
    tx = optax.chain(loss_scaled(master_weights(optax.adam(1e-2))), optax.identity())
    params = params_of(dtype=jnp.float16)
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    grads = jax.tree.map(lambda p: jnp.full(p.shape, 3.0), params)
    state = state.apply_gradients(grads=grads)
    fresh = TrainState.create(apply_fn=None, params=params_of(1, jnp.float16), tx=tx)
    back = flax.serialization.from_bytes(fresh, flax.serialization.to_bytes(state))

    jax.tree.map(np.testing.assert_array_equal, state, back)
    assert jax.tree.structure(state) == jax.tree.structure(back)
    assert scale_of(state) == scale_of(back)


def test_bytes_of_another_policy_are_refused():
    """The fields of both are named."""
    held = loss_scaled(optax.sgd(0.1), "backoff").init(jnp.ones(2))
    fresh = loss_scaled(optax.sgd(0.1), "headroom").init(jnp.ones(2))
    with pytest.raises(StructureError, match="not a HeadroomState.*policy"):
        flax.serialization.from_bytes(fresh, flax.serialization.to_bytes(held))
