"""What must hold on several devices; run by test_devices.py, in a process with four."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from buoy.jax import (
    MissingAxisError,
    last_step,
    loss_scaled,
    scale_of,
    value_and_grad,
)
from tests.told import FINITE, NOT_FINITE, Told

STEPS = 12
OVERFLOWS = {2: 0, 3: 3, 7: 1}  # step: the device whose rows overflow


def test_there_are_four_devices():
    assert 4 == jax.device_count()


def loss_fn(params, x):
    """A loss whose backward pass overflows FP16 for large rows."""
    hidden = x.astype(jnp.float16) @ params["w"].astype(jnp.float16)
    return jnp.mean(jnp.square(hidden.astype(jnp.float32) + params["b"]))


def start():
    return {"w": jnp.full((4, 4), 0.5), "b": jnp.zeros(4)}


def batch(step):
    x = np.linspace(0.1, 1.0, 32, dtype=np.float32).reshape(8, 4)
    if step in OVERFLOWS:
        x[2 * OVERFLOWS[step]] = 6e4
    return jnp.asarray(x)


def trained(step, state, place=lambda x: x):
    """Run the steps; return the scales after each, and the last state."""
    scales = []
    for i in range(STEPS):
        *state, _ = step(*state, place(batch(i)))
        scales.append(float(jnp.ravel(scale_of(state[1]))[0]))
    return scales, state


def make(policy, **options):
    return loss_scaled(optax.adam(1e-2), policy, max_norm=1.0, **options)


@functools.cache
def alone(policy):
    """Train on one device, which everything else is compared with."""
    tx = make(policy)

    @jax.jit
    def step(params, state, x):
        loss, grads = value_and_grad(loss_fn)(state, params, x)
        updates, state = tx.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state, loss

    return trained(step, (start(), tx.init(start())))


def assert_as_alone(policy, scales, params):
    expected, (single, _) = alone(policy)
    assert expected == scales
    for name, value in single.items():
        held = np.asarray(params[name])
        np.testing.assert_allclose(held, value, rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize(
    ("policy", "kind", "sharded"),
    [
        ("backoff", AxisType.Auto, False),
        ("headroom", AxisType.Auto, True),
        ("backoff", AxisType.Explicit, True),
        ("headroom", AxisType.Explicit, False),
    ],
)
def test_spmd_jit(policy, kind, sharded):
    """Arrays are global: data, and parameters too, may lie over a mesh."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    tx = make(policy)

    @jax.jit
    def step(params, state, x):
        def loss(params, x):
            if sharded:
                params = jax.tree.map(gathered, params)
            return loss_fn(params, x)

        loss, grads = value_and_grad(loss)(state, params, x)
        if sharded:
            grads = jax.tree.map(scattered, grads)
        updates, state = tx.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state, loss

    def gathered(w):
        if kind is AxisType.Auto:
            return w
        return jax.sharding.reshard(w, P())

    def scattered(g):
        if kind is AxisType.Auto:
            return g
        return jax.sharding.reshard(g, P("data"))

    with jax.set_mesh(mesh):
        params = start()
        if sharded:
            params = jax.device_put(params, NamedSharding(mesh, P("data")))
        state = tx.init(params)
        place = functools.partial(jax.device_put, device=NamedSharding(mesh, P("data")))
        scales, (params, state) = trained(step, (params, state), place)
        assert_as_alone(policy, scales, params)
        assert step._cache_size() <= 2  # the first call may see other shardings


def shared(loss_fn, axis):
    """Let each device tell the loss of all, and differentiate its own."""

    def told(params, x):
        own = loss_fn(params, x)
        return own + jax.lax.stop_gradient(jax.lax.pmean(own, axis) - own)

    return told


# A policy that looks ahead takes the largest loss of all devices: it goes the way of
# one device where they tell the loss of all.
SEEN = [("backoff", "own"), ("headroom", "own"), ("headroom", "shared")]


@pytest.mark.parametrize(
    ("policy", "seen", "check_vma"),
    [(*seen, False) for seen in SEEN] + [(*seen, True) for seen in SEEN[:2]],
)
def test_shard_map(policy, seen, check_vma):
    """Each device sees its rows; they agree on the scale and on what is applied."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    tx = make(policy, axis_name="data")

    own = loss_fn if seen == "own" else shared(loss_fn, "data")

    def loss_of_all(params, x):
        return jax.lax.pmean(loss_fn(params, x), "data")

    def step(params, state, x):
        if check_vma:  # JAX itself adds up the gradients of what devices share
            loss, grads = value_and_grad(loss_of_all)(state, params, x)
        else:
            loss, grads = value_and_grad(own)(state, params, x)
            grads = jax.lax.pmean(grads, "data")
        updates, state = tx.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state, loss

    mapped = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(P(), P(), P("data")),
            out_specs=P(),
            check_vma=check_vma,
        )
    )
    scales, (params, state) = trained(mapped, (start(), tx.init(start())))
    if policy == "backoff" or check_vma or seen == "shared":
        assert_as_alone(policy, scales, params)
    for shards in map(shards_of, jax.tree.leaves((params, state))):
        for other in shards[1:]:
            np.testing.assert_array_equal(shards[0], other)


def shards_of(array):
    return [np.asarray(shard.data) for shard in array.addressable_shards]


@pytest.mark.parametrize(("policy", "seen"), SEEN)
def test_pmap(policy, seen):
    """All copies hold the same scale and the same weights."""
    tx = make(policy, axis_name="i")

    own = loss_fn if seen == "own" else shared(loss_fn, "i")

    @functools.partial(jax.pmap, axis_name="i")
    def step(params, state, x):
        loss, grads = value_and_grad(own)(state, params, x)
        grads = jax.lax.pmean(grads, "i")
        updates, state = tx.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state, loss

    state = (start(), tx.init(start()))
    state = jax.tree.map(lambda x: jnp.stack([x] * 4), state)
    scales, (params, state) = trained(step, state, lambda x: x.reshape(4, 2, 4))
    for leaf in jax.tree.leaves((params, state)):
        for other in np.asarray(leaf)[1:]:
            np.testing.assert_array_equal(np.asarray(leaf)[0], other)
    if policy == "backoff" or seen == "shared":
        assert_as_alone(policy, scales, jax.tree.map(lambda x: x[0], params))


def test_without_agreement_the_devices_part():
    """What `axis_name` is for: the test of agreement can fail."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    tx = make("backoff", axis_name=())

    def step(params, state, x):
        loss, grads = value_and_grad(loss_fn)(state, params, x)
        _, state = tx.update(grads, state, params, value=loss)
        return scale_of(state)[None]

    specs = {"in_specs": (P(), P(), P("data")), "out_specs": P("data")}
    mapped = jax.shard_map(step, mesh=mesh, check_vma=False, **specs)
    scales = jax.jit(mapped)(start(), tx.init(start()), batch(3))

    assert [2.0**16] * 3 + [2.0**15] == scales.tolist()


@pytest.mark.parametrize("check_vma", [True, False])
def test_parameters_sharded_inside_shard_map(check_vma):
    """One device's overflow stops all; with accounts kept, the norm is global."""
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))
    tx = loss_scaled(optax.sgd(1.0), "static", max_norm=1.0, axis_name="model")
    grads = jnp.arange(8.0) * 1024
    norm = float(jnp.linalg.norm(jnp.arange(8.0)))

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return updates, state

    params = jnp.zeros(8)
    state = tx.init(params)
    mapped = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(P("model"), P(), P("model")),
            out_specs=(P("model"), P()),
            check_vma=check_vma,
        )
    )
    updates, after = mapped(params, state, grads)
    if check_vma:
        np.testing.assert_allclose(updates, -jnp.arange(8.0) / norm, rtol=1e-6)
        assert norm == pytest.approx(last_step(after).norm)
    updates, after = mapped(params, state, grads.at[5].set(jnp.nan))
    assert not np.any(updates)
    assert last_step(after).skipped
    if check_vma:  # the sum of squares overflows: clipped by a bound of the norm
        updates, after = mapped(params, state, jnp.full(8, 1e30))
        assert last_step(after).norm == pytest.approx(8**0.5 * 1e30 / 1024)
        assert np.linalg.norm(updates) == pytest.approx(1.0)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_missing_axis_name_is_an_error(check_vma):
    """Not saying over what to agree is refused, with the leaf and the cure."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    tx = make("backoff")

    def step(params, state, grads):
        return tx.update(grads, state, params)[0]

    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(P(), P(), P("data")),
        out_specs=P("data"),
        check_vma=check_vma,
    )
    params = {"layer": {"w": jnp.ones(2)}}
    grads = {"layer": {"w": jnp.ones(8)}}
    with pytest.raises(MissingAxisError, match="`layer.w`.*axis_name='data'"):
        jax.jit(mapped)(params, tx.init(params), grads)


def test_a_varying_loss_without_axis_name_is_an_error():
    """A policy that looks ahead would choose another scale on each device."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    tx = make("loss_ahead")

    def step(params, state, x):
        return value_and_grad(loss_fn)(state, params, x)[1]

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P()
    )
    with pytest.raises(MissingAxisError, match="`loss` differs.*axis_name='data'"):
        jax.jit(mapped)(start(), tx.init(start()), batch(0))


@pytest.mark.parametrize(
    ("policy", "dtype", "kind"),
    [
        ("backoff", "float32", AxisType.Auto),
        ("headroom", "float16", AxisType.Auto),
        ("backoff", "bfloat16", AxisType.Explicit),
        ("headroom", "float32", AxisType.Explicit),
    ],
)
def test_one_bad_number_in_one_shard_stops_the_step(policy, dtype, kind):
    """On every device in turn: a maximum over shards may drop NaN."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    spread = NamedSharding(mesh, P("data"))
    tx = make(policy)

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    with jax.set_mesh(mesh):
        params = {"a": jnp.ones(4), "w": jnp.ones((8, 3))}
        state = tx.init(jax.device_put(params, spread))
        for value in (np.nan, np.inf, -np.inf):
            for row in range(1, 8, 2):
                grads = {"a": np.ones(4), "w": np.ones((8, 3))}
                grads["w"][row, 1] = value
                grads = jax.tree.map(lambda g: jnp.asarray(g, dtype), grads)
                placed = jax.device_put((params, grads), spread)
                after, told = step(placed[0], state, placed[1])
                assert last_step(told).offenders == ("w",)
                assert not last_step(told).applied
                for name, held in params.items():
                    np.testing.assert_array_equal(after[name], held)


def mapped_update(tx, loss_of_device):
    """Compile an update on four devices, of which each passes a loss of its own."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))

    def step(params, state, losses):
        loss = loss_of_device(losses)
        return tx.update(params, state, params, value=loss)[1]

    specs = {"in_specs": (P(), P(), P("data")), "out_specs": P()}
    return jax.jit(jax.shard_map(step, mesh=mesh, check_vma=False, **specs))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_loss_of_any_device_is_told_to_all(bad):
    """Whether each passes its own loss, or the mean of all."""
    tx = loss_scaled(optax.sgd(0.1), Told(), axis_name="data")
    own = mapped_update(tx, lambda losses: losses[0])
    mean = mapped_update(tx, lambda losses: jax.lax.pmean(losses[0], "data"))
    for device in range(4):
        losses = np.full(4, 0.5, np.float32)
        losses[device] = bad
        for update in (own, mean):
            state = update(start(), tx.init(start()), losses)
            assert shards_of(state.scaling.told) == [NOT_FINITE] * 4
            assert last_step(state).loss in (np.inf, -np.inf)
            state = update(start(), state, np.full(4, 0.5, np.float32))
            assert shards_of(state.scaling.told) == [FINITE] * 4


@pytest.mark.parametrize("policy", [Told(), "backoff", "static"])
def test_a_step_has_one_collective(policy):
    """The loss rides in the message of the gradients' findings."""
    tx = loss_scaled(optax.sgd(0.1), policy, axis_name="data", max_norm=1.0)
    update = mapped_update(tx, lambda losses: losses[0])

    text = update.lower(start(), tx.init(start()), np.ones(4, np.float32)).as_text()

    assert text.count("all_reduce") == 1
