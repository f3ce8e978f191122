"""What became of a step: applied or not, why, how large, and whose fault."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import buoy
from buoy._core.policies.presets import PeerBackoff, Quirks
from buoy.jax import applied_of, last_step, loss_scaled
from tests.jax.nets import batch_of, params_of, stepper

TX = loss_scaled(optax.adam(1e-2), "backoff", history=16, measure_amax=True)
UPDATE = jax.jit(TX.update)
PARAMS = {"a": jnp.ones(2), "b": {"c": jnp.ones(3)}}
FINE = jax.tree.map(jnp.ones_like, PARAMS)
BAD = {"a": jnp.ones(2), "b": {"c": jnp.array([1.0, jnp.nan, 1.0])}}


def after(losses, bad_from=None):
    """Take a step for each loss; those from `bad_from` on overflow."""
    state = TX.init(PARAMS)
    for i, loss in enumerate(losses):
        grads = BAD if bad_from is not None and i >= bad_from else FINE
        _, state = UPDATE(grads, state, PARAMS, value=jnp.float32(loss))
    return state


def test_an_applied_step_tells_its_numbers():
    """Norm and largest gradient are unscaled; everything is a plain number."""
    step = last_step(after([0.5]))

    assert (True, False) == (step.applied, step.skipped)
    assert buoy.Verdict.APPLIED is step.verdict
    assert (65536.0, 65536.0) == (step.scale, step.next_scale)
    assert step.norm == pytest.approx(5**0.5 / 65536)
    assert 1 / 65536 == step.amax
    assert 0.5 == step.loss
    assert () == step.offenders
    assert isinstance(step, buoy.Row)
    assert "APPLIED" in repr(step)


@pytest.mark.parametrize("every", [True, False])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_with_clipping_the_largest_gradient_is_known_where_headroom_needs_it(
    every, max_norm
):
    """In the first 16 steps and in every third; `measure_amax` asks for all of them."""
    tx = loss_scaled(optax.sgd(0.0), max_norm=max_norm, measure_amax=every)
    update, state, known = jax.jit(tx.update), tx.init(PARAMS), []
    for _ in range(32):
        _, state = update(FINE, state, PARAMS, value=jnp.float32(1.0))
        step = last_step(state)
        assert step.amax in (None, 1.0 / step.scale)
        known.append(step.amax is not None)

    wanted = [i < 16 or i % 3 == 0 for i in range(32)]
    assert known == (wanted if max_norm and not every else [True] * 32)


def test_a_size_that_was_not_measured_is_unknown_on_every_device():
    """Under `vmap` with a named axis, too; an overflow is inf, as ever."""
    tx = loss_scaled(optax.sgd(0.0), max_norm=1.0, axis_name="i")

    @jax.jit
    def update(grads, state):
        def one(grads):
            return tx.update(grads, state, PARAMS, value=jnp.float32(1.0))[1]

        return jax.vmap(one, axis_name="i", out_axes=None)(grads)

    fine, bad = (jax.tree.map(lambda x: jnp.stack([x] * 2), g) for g in (FINE, BAD))
    state, sizes = tx.init(PARAMS), []
    for _ in range(22):
        state = update(fine, state)
        step = last_step(state)
        sizes.append(step.amax and step.amax * step.scale)
    assert [1.0] * 16 + [None] * 2 + [1.0, None, None, 1.0] == sizes

    assert np.inf == last_step(update(bad, tx.init(PARAMS))).amax


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [
        ([1.0, 1.1, 0.9, 1.0, 1.0], "scale_too_high"),
        ([1.0, 1.1, 0.9, 1.0, np.nan], "forward_nonfinite"),
        ([1.0, 1.1, 0.9, 1.0, np.inf], "forward_nonfinite"),
        ([1.0, 1.1, 0.9, 1.0, 50.0], "bad_batch"),
        ([1.0, 2.0, 4.0, 8.0, 16.0], "divergence"),
        ([1.0] * 12 + [1.0, 1.1, 0.9, 1.0] * 3 + [50.0], "bad_batch"),  # a full ring
    ],
)
def test_verdicts_from_the_losses(losses, verdict):
    """The rules are those of every front end."""
    step = last_step(after(losses, bad_from=len(losses) - 1))

    assert verdict == step.verdict
    assert ("b.c",) == step.offenders
    assert step.skipped


def test_losses_of_skipped_steps_are_not_the_usual_ones():
    """However many of the last steps were skipped, as in every front end."""
    for skipped in range(1, 9):
        state = after([1.0] * 4 + [50.0] * skipped, bad_from=4)
        assert "bad_batch" == last_step(state).verdict

    rising = after([1.0, 1.0, 2.0, 4.0, 8.0, 16.0], bad_from=2)
    assert "scale_too_high" == last_step(rising).verdict  # only two were applied


def test_without_a_loss_the_scale_is_to_blame():
    state = TX.init(PARAMS)
    _, state = UPDATE(BAD, state, PARAMS)

    assert last_step(state).loss is None
    assert "scale_too_high" == last_step(state).verdict


def test_poisoned_weights_and_states_are_named():
    """Weights are looked at where they are given; the inner state always."""
    state = after([1.0, 1.0], bad_from=1)
    poisoned = {**PARAMS, "a": jnp.array([1.0, jnp.inf])}
    assert "scale_too_high" == last_step(state, PARAMS).verdict
    assert "poisoned" == last_step(state, poisoned).verdict

    state = TX.init(PARAMS)
    inner = jax.tree.map(
        lambda x: x * jnp.nan if x.dtype == jnp.float32 else x, state.inner
    )
    _, state = UPDATE(BAD, dataclasses.replace(state, inner=inner), PARAMS)
    assert "poisoned" == last_step(state).verdict
    inner = jax.tree.map(lambda x: x + jnp.inf if x.ndim else x, TX.init(PARAMS).inner)
    assert "poisoned" == last_step(dataclasses.replace(state, inner=inner)).verdict


def test_a_best_loss_that_starts_at_inf_is_no_poison():
    """Optax keeps it in the state of the learning rate; NaN there is one."""
    plateau = optax.contrib.reduce_on_plateau()
    tx = loss_scaled(optax.chain(optax.sgd(0.1), plateau), "backoff")
    state = tx.init(PARAMS)
    assert np.inf in jax.tree.leaves(state.inner)
    _, state = tx.update(BAD, state, PARAMS, value=jnp.float32(1.0))
    assert "scale_too_high" == last_step(state, PARAMS).verdict

    spoiled = jax.tree.map(lambda x: x * jnp.nan, state.inner)
    state = dataclasses.replace(state, inner=spoiled)
    assert "poisoned" == last_step(state, PARAMS).verdict
    params = {**PARAMS, "d": jnp.float32(jnp.inf)}
    assert "poisoned" == last_step(after([1.0], bad_from=0), params).verdict


def test_every_gradient_is_attributed_by_its_path():
    """Overflow injected into each leaf in turn is found in that leaf."""
    params = params_of()
    tx = loss_scaled(optax.sgd(0.1), "backoff")
    update = jax.jit(tx.update)
    flat, shape = jax.tree.flatten(params)
    names = ["first.b", "first.w", "last.w"]
    for i, name in enumerate(names):
        grads = list(flat)
        grads[i] = grads[i].at[0].set(jnp.inf)
        _, state = update(shape.unflatten(grads), tx.init(params), params)
        assert (name,) == last_step(state).offenders


def test_what_must_not_move_on_skips_is_gated_under_jit():
    """An average of the weights follows applied steps only."""
    tx = loss_scaled(optax.sgd(0.1), "backoff")
    step = stepper(tx)

    @jax.jit
    def averaged(params, state, mean, x):
        params, state, _ = step(params, state, x)
        moved = optax.incremental_update(params, mean, 0.5)
        keep = applied_of(state)
        mean = jax.tree.map(lambda a, b: jnp.where(keep, a, b), moved, mean)
        return params, state, mean

    params = mean = params_of()
    state = tx.init(params)
    params, state, mean = averaged(params, state, mean, batch_of(0))
    before = mean
    params, state, mean = averaged(params, state, mean, batch_of(1) * jnp.nan)

    assert "forward_nonfinite" == last_step(state).verdict
    np.testing.assert_array_equal(before["last"]["w"], mean["last"]["w"])


def test_a_policy_that_gives_up_says_so():
    """Presets that stop at their floor flag it; nothing raises inside jit."""
    quirks = Quirks(stop_at_floor=True)
    policy = PeerBackoff(init_scale=2.0, min_scale=1.0, quirks=quirks)
    tx = loss_scaled(optax.sgd(0.1), policy)
    update = jax.jit(tx.update)
    _, state = update(BAD, tx.init(PARAMS), PARAMS)
    assert not last_step(state).collapsed
    _, state = update(BAD, state, PARAMS)
    assert last_step(state).collapsed


def test_overflows_do_not_stop_a_hunt_for_nans():
    """With `jax_debug_nans` a skipped step is no error: nothing NaN leaves the step."""
    tx = loss_scaled(optax.adam(1e-2), "headroom", max_norm=1.0)
    update = jax.jit(tx.update)
    with jax.debug_nans(True):
        state = tx.init(PARAMS)
        for grads in (FINE, INF, FINE):
            updates, state = update(grads, state, PARAMS)
            assert np.all(np.isfinite(updates["a"]))

    assert 3 == int(state.steps)
    assert last_step(state).applied


INF = {"a": jnp.ones(2), "b": {"c": jnp.array([1.0, jnp.inf, -jnp.inf])}}
