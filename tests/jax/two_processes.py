"""One of two processes of a run; test_devices.py starts both."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from buoy.jax import last_step, loss_scaled, scale_of, value_and_grad

STEPS = 10
OVERFLOWS = {2: 0, 5: 3, 6: 2}  # step: the row that overflows, of this or that process


def loss_fn(params, x):
    hidden = x.astype(jnp.float16) @ params["w"].astype(jnp.float16)
    return jnp.mean(jnp.square(hidden.astype(jnp.float32)))


def batch(step):
    x = np.linspace(0.1, 1.0, 16, dtype=np.float32).reshape(4, 4)
    if step in OVERFLOWS:
        x[OVERFLOWS[step]] = 6e4
    return x


def spmd(mesh):
    """Arrays are global, and so is the decision."""
    tx = loss_scaled(optax.adam(1e-2), "headroom", max_norm=1.0)

    @jax.jit
    def step(params, state, x):
        loss, grads = value_and_grad(loss_fn)(state, params, x)
        updates, state = tx.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    return tx, step


def mapped(mesh):
    """Each process sees its rows; they agree by name."""
    tx = loss_scaled(optax.adam(1e-2), "backoff", axis_name="data")

    def step(params, state, x):
        loss, grads = value_and_grad(loss_fn)(state, params, x)
        grads = jax.lax.pmean(grads, "data")
        updates, state = tx.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    specs = {"in_specs": (P(), P(), P("data")), "out_specs": P()}
    return tx, jax.jit(jax.shard_map(step, mesh=mesh, check_vma=False, **specs))


def main(port, rank):
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(rank))
    kind = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(kind,))
    rows = NamedSharding(mesh, P("data"))
    everywhere = NamedSharding(mesh, P())
    for make in (spmd, mapped):
        tx, step = make(mesh)
        start = {"w": np.full((4, 4), 0.5, np.float32)}
        params = jax.device_put(start, everywhere)
        state = jax.jit(tx.init, out_shardings=everywhere)(params)
        told = []
        for i in range(STEPS):
            whole = batch(i)
            x = jax.make_array_from_callback(whole.shape, rows, whole.__getitem__)
            params, state = step(params, state, x)
            told.append((float(scale_of(state)), last_step(state).applied))
        weights = np.asarray(params["w"]).tobytes().hex()[:64]
        sys.stdout.write(f"{make.__name__} {told} {weights}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
