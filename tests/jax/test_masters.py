"""Masters of half-precision weights, and dtypes on trees."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import buoy
from buoy.jax import (
    Dtypes,
    OptionError,
    cast,
    loss_scaled,
    master_weights,
)
from tests.jax.nets import batch_of, loss_fn, params_of, stepper


def ends(tx, dtype, steps=150):
    """Train, on tiny steps, and return the loss and the weights."""
    step = stepper(tx)
    params = params_of(dtype=dtype)
    state = tx.init(params)
    for i in range(steps):
        params, state, _ = step(params, state, batch_of(i % 4))
    assert 1 == step._cache_size()
    assert {jnp.dtype(dtype)} == {x.dtype for x in jax.tree.leaves(params)}
    return float(loss_fn(params, batch_of(0))), params, state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "order"), [(jnp.float16, "inside"), (jnp.bfloat16, "around")]
)
def test_half_parameters_learn_as_float32_ones(dtype, order):
    """Steps far below a part in a thousand add up in the masters."""
    inner = optax.adam(2e-4)
    wide, _, _ = ends(loss_scaled(inner), jnp.float32)
    if order == "inside":
        tx = loss_scaled(master_weights(inner))
    else:
        tx = master_weights(loss_scaled(inner))
    half, params, state = ends(tx, dtype)
    start = float(loss_fn(params_of(), batch_of(0)))

    assert half == pytest.approx(wide, rel=2e-2)
    assert half < start - 0.7 * (start - wide)
    masters = state.inner.masters if order == "inside" else state.masters
    for master, param in zip(
        jax.tree.leaves(masters), jax.tree.leaves(params), strict=True
    ):
        assert jnp.float32 == master.dtype
        np.testing.assert_array_equal(master.astype(dtype), param)


@pytest.mark.slow
def test_a_skipped_step_leaves_masters_alone():
    """Both orders: neither the masters nor the weights move."""
    params = params_of(dtype=jnp.float16)
    bad = jax.tree.map(lambda p: p.astype(jnp.float32) * jnp.nan, params)
    for tx in (
        loss_scaled(master_weights(optax.adam(0.1))),
        master_weights(loss_scaled(optax.adam(0.1))),
    ):
        state = tx.init(params)
        updates, after = jax.jit(tx.update)(bad, state, params)
        jax.tree.map(
            np.testing.assert_array_equal, params, optax.apply_updates(params, updates)
        )
        masters = [s.inner if hasattr(s, "plan") else s for s in (state, after)]
        jax.tree.map(
            np.testing.assert_array_equal, masters[0].masters, masters[1].masters
        )


def test_parameters_of_mixed_dtypes_keep_theirs():
    """Only halves get a master; the others are updated as they are."""
    params = {"half": jnp.ones(2, jnp.float16), "full": jnp.ones(2), "none": None}
    tx = master_weights(optax.sgd(0.25))
    state = tx.init(params)
    grads = {"half": jnp.ones(2), "full": jnp.ones(2), "none": None}
    updates, state = tx.update(grads, state, params)
    after = optax.apply_updates(params, updates)

    assert state.masters["full"] is None
    assert [0.75, 0.75] == after["half"].tolist() == after["full"].tolist()
    assert jnp.float16 == after["half"].dtype


def test_cast_touches_floats_alone():
    """Integers, keys, booleans, None, numbers and strings pass, as the same objects."""
    tree = {
        "w": jnp.ones(2),
        "numpy": np.ones(2),
        "step": jnp.array(3),
        "mask": jnp.array([True]),
        "key": jax.random.key(0),
        "complex": jnp.ones(1, jnp.complex64),
        "none": None,
        "lr": 0.1,
        "name": "net",
    }
    made = cast(tree, "bfloat16")

    assert jnp.bfloat16 == made["w"].dtype == made["numpy"].dtype
    for name in ("step", "mask", "key", "complex", "none", "lr", "name"):
        assert tree[name] is made[name], name
    assert cast(made, jnp.bfloat16)["w"] is made["w"]


def test_dtypes_go_in_and_out():
    """Arguments in one dtype, results in another, under jit; keywords too."""
    half = Dtypes("float32", "float16", "bfloat16")
    seen = []

    @jax.jit
    @half.computed
    def apply(w, *, x):
        seen.append((w.dtype, x.dtype))
        return {"out": w @ x, "count": jnp.array(1)}

    out = apply(jnp.ones((2, 2)), x=jnp.ones(2))

    assert [(jnp.float16, jnp.float16)] == seen
    assert jnp.bfloat16 == out["out"].dtype
    assert jnp.int32 == out["count"].dtype
    assert jnp.float32 == half.to_param(out)["out"].dtype
    assert hash(half) == hash(Dtypes(jnp.float32, jnp.float16, jnp.bfloat16))


@pytest.mark.parametrize("dtype", ["int32", "float33", None])
def test_only_floats_are_dtypes(dtype):
    if dtype is None:  # NumPy takes None for float64
        dtype = object()
    with pytest.raises(OptionError, match="A floating-point dtype such as"):
        Dtypes(compute=dtype)


def test_masters_and_clipping_compose_with_a_static_scale():
    """Unscaled and clipped gradients reach the masters."""
    tx = loss_scaled(
        master_weights(optax.sgd(1.0)), buoy.Static(init_scale=8.0), max_norm=1.0
    )
    params = jnp.zeros(4, jnp.float16)
    updates, _ = tx.update(jnp.full(4, 80.0, jnp.float16), tx.init(params), params)

    assert [-0.5] * 4 == updates.tolist()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_master_beyond_fp16_makes_no_infinite_weight(sign):
    """The parameter stays at FP16's largest number, and follows when it returns."""
    tx = loss_scaled(master_weights(optax.sgd(1.0)), buoy.Static(init_scale=1.0))
    params = jnp.full(2, sign * 65504.0, jnp.float16)
    state = tx.init(params)
    for grad, expected in ((-500.0, 65504.0), (-500.0, 65504.0), (1504.0, 64992.0)):
        updates, state = tx.update(jnp.full(2, sign * grad), state, params)
        params = optax.apply_updates(params, updates)
        assert [sign * expected] * 2 == params.tolist()


def test_the_inner_transformation_gets_fp16_parameters_as_float32():
    """Else a decay of small weights underflows: 1e-4 x 1e-4 is 0 in FP16."""
    params = {"w": jnp.full(2, 1e-4, jnp.float16)}
    tx = loss_scaled(optax.add_decayed_weights(1e-4), "static")
    with pytest.warns(UserWarning, match="float16"):
        state = tx.init(params)
    updates, _ = tx.update({"w": jnp.zeros(2)}, state, params)

    wanted = np.float32(params["w"][0]) * np.float32(1e-4)
    np.testing.assert_allclose(updates["w"], wanted, rtol=1e-6)
