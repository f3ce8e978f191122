"""Mistakes get an error that names the leaf and the cure."""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import optax
import pytest

import buoy
from buoy._core.ring import COLUMNS
from buoy.jax import (
    IntegerLeafError,
    NoScaleError,
    NoStepError,
    OptionError,
    SeveralScalesError,
    StructureError,
    UnboundAxisError,
    UnhashablePolicyError,
    last_step,
    loss_scaled,
    master_weights,
    scale_of,
    value_and_grad,
)

PARAMS = {"layers": [{"w": jnp.ones(2)}, {"w": jnp.ones(2)}], "head": jnp.ones(3)}


def tx():
    return loss_scaled(optax.adam(1e-3), "backoff")


def test_gradients_of_another_tree_are_refused():
    """What is missing and what is too much is named, with or without parameters."""
    state = tx().init(PARAMS)
    grads = {"layers": [{"w": jnp.ones(2)}], "tail": jnp.ones(3), "head": jnp.ones(3)}
    for params in (PARAMS, None):
        with pytest.raises(StructureError, match="layers.1.w.*No parameter for `tail`"):
            tx().update(grads, state, params)
    with pytest.raises(StructureError, match="their containers differ"):
        tx().update({**PARAMS, "layers": tuple(PARAMS["layers"])}, state, PARAMS)


def test_gradients_of_another_shape_are_refused():
    """The leaf and both shapes are named."""
    grads = {**PARAMS, "head": jnp.ones((4, 3))}
    with pytest.raises(StructureError, match=r"`head` has shape \(4, 3\).*averaged"):
        tx().update(grads, tx().init(PARAMS), PARAMS)


@pytest.mark.parametrize("leaf", [jnp.arange(3), jnp.ones(2, bool), "name"])
def test_leaves_without_a_gradient_are_refused(leaf):
    """At init, in update and in value_and_grad, with where it is and what to do."""
    params = {**PARAMS, "steps": {"count": leaf}}
    state = tx().init(PARAMS)
    with pytest.raises(IntegerLeafError, match="parameter at `steps.count`.*partition"):
        tx().init(params)
    with pytest.raises(IntegerLeafError, match="gradient at `steps.count`"):
        tx().update(params, state, params)
    with pytest.raises(IntegerLeafError, match="parameter at `steps.count`"):
        value_and_grad(lambda p: jnp.sum(p["head"]))(state, params)


def test_none_is_no_leaf():
    """What equinox leaves out is left out."""
    params = {**PARAMS, "frozen": None}
    _, grads = value_and_grad(lambda p: jnp.sum(p["head"]))(tx().init(params), params)

    assert grads["frozen"] is None


def test_a_state_of_something_else_is_refused():
    """Another transformation's state, another policy's, or none at all."""
    plain = optax.adam(1e-3).init(PARAMS)
    with pytest.raises(NoScaleError, match="not a state of `loss_scaled`"):
        tx().update(PARAMS, plain, PARAMS)
    with pytest.raises(NoScaleError, match="must be wrapped"):
        scale_of(plain)
    other = loss_scaled(optax.adam(1e-3), "headroom").init(PARAMS)
    with pytest.raises(StructureError, match="HeadroomState.*Backoff.*another policy"):
        tx().update(PARAMS, other, PARAMS)


def test_two_scales_are_one_too_many():
    """The places are named."""
    with pytest.raises(SeveralScalesError, match=r"\[0\].*\[1\].*only one scale"):
        scale_of((tx().init(PARAMS), tx().init(PARAMS)))


def test_nothing_to_tell_before_the_first_step():
    with pytest.raises(NoStepError, match="No step has been taken"):
        last_step(tx().init(PARAMS)).applied  # noqa: B018


@dataclass(frozen=True)
class Listing(buoy.NoScaling):
    """A policy with a list in it."""

    table: list[float] = field(default_factory=lambda: [1.0, 2.0])


class Thawed(buoy.NoScaling):
    """A policy that may be changed, and so has no hash."""

    __hash__ = None


def test_a_policy_without_a_hash_is_refused():
    """Before anything is compiled, with the field that has none."""
    with pytest.raises(UnhashablePolicyError, match="`table`, .1.0, 2.0.*a tuple"):
        loss_scaled(optax.adam(1e-3), Listing())
    with pytest.raises(UnhashablePolicyError, match="the policy itself has no hash"):
        loss_scaled(optax.adam(1e-3), Thawed())


def test_a_policy_in_float64_names_the_switch():
    with pytest.raises(buoy.PolicyError, match="jax_enable_x64"):
        loss_scaled(optax.adam(1e-3), "deepspeed").init(PARAMS)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_norm": 0.0}, "`max_norm` must be above 0"),
        ({"max_norm": float("nan")}, "`max_norm` must be above 0"),
        ({"max_norm": "1"}, "`max_norm` must be above 0"),
        ({"history": 0}, "`history` must be a whole number"),
        ({"axis_name": 3}, "`axis_name` must be the name"),
    ],
)
def test_options_are_checked(options, match):
    with pytest.raises(OptionError, match=match):
        loss_scaled(optax.adam(1e-3), **options)


def test_an_axis_name_outside_of_its_axis_is_an_error():
    """Under plain jit there is no axis to agree over."""
    tx = loss_scaled(optax.adam(1e-3), "backoff", axis_name="data")
    with pytest.raises(UnboundAxisError, match="leave `axis_name` out"):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)


def test_what_is_wrapped_must_be_a_transformation():
    with pytest.raises(OptionError, match="wraps an optax transformation"):
        loss_scaled(1e-3)


def test_masters_need_the_parameters():
    tx = master_weights(optax.sgd(0.1))
    with pytest.raises(StructureError, match="needs the parameters"):
        tx.update(PARAMS, tx.init(PARAMS))


def test_one_inside_of_another_is_refused():
    """Gradients are unscaled once."""
    with pytest.raises(OptionError, match="unscaled twice"):
        loss_scaled(optax.chain(tx(), optax.identity())).init(PARAMS)


@pytest.mark.parametrize(
    ("out", "has_aux", "match"),
    [
        (lambda loss: (loss, 3), False, "got tuple.*has_aux=True"),
        (lambda loss: {"loss": loss}, False, "got dict"),
        (lambda loss: loss, True, "must return a pair"),
        (lambda loss: (loss, 1, 2), True, "must return a pair"),
    ],
)
def test_what_is_no_loss_is_refused(out, has_aux, match):
    """With the way to hand back more than the loss."""
    grad_fn = value_and_grad(lambda p: out(jnp.sum(p["head"])), has_aux=has_aux)
    with pytest.raises(buoy.jax.LossError, match=match):
        grad_fn(tx().init(PARAMS), PARAMS)


def test_errors_come_before_anything_is_lost():
    """After a refused update the same state goes on."""
    state = tx().init(PARAMS)
    with pytest.raises(StructureError):
        tx().update({"head": jnp.ones(3)}, state, PARAMS)
    _, state = jax.jit(tx().update)(PARAMS, state, PARAMS)

    assert last_step(state).applied


def damaged(name, value):
    """Replace one part of a good state."""
    state = tx().init(PARAMS)
    if name.startswith("scaling."):
        part = {name.partition(".")[2]: value}
        return replace(state, scaling=replace(state.scaling, **part))
    return replace(state, **{name: value})


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("steps", None, "NoneType"),
        ("steps", jnp.ones(()), "float32.*must be an integer array"),
        ("steps", jnp.zeros(3, int), r"int32 of shape \(3,\)"),
        ("rows", jnp.zeros((64, 3)), r"shape \(64, 3\)"),
        ("rows", jnp.zeros((0, len(COLUMNS))), r"shape \(0, 9\)"),
        ("rows", jnp.zeros((9, len(COLUMNS))), "as many as `bad`"),
        ("rows", "text", "str"),
        ("bad", jnp.zeros((64, 1), bool), r"shape \(64, 1\)"),
        ("scaling.scale", None, "NoneType"),
        ("bad", jnp.zeros((64, 2)), "float32.*must be a boolean array"),
        ("scaling.scale", jnp.zeros((), int), "int32.*must be a floating-point array"),
        ("scaling.scale", jnp.ones(2), r"shape \(2,\)"),
        ("scaling.clean_steps", "7", "str"),
    ],
)
def test_damaged_states_are_refused(name, value, found):
    """By field and value, before anything is computed."""
    with pytest.raises(StructureError, match=f"damaged: its `{name}` is .*{found}"):
        tx().update(PARAMS, damaged(name, value), PARAMS)


@pytest.mark.parametrize("scale", [jnp.nan, 0.0, -8.0, jnp.inf, 1e-40])
def test_a_saved_scale_that_cannot_be_used_comes_back_within_its_bounds(scale):
    """No weight changes by it, and the next steps go on."""
    state = damaged("scaling.scale", jnp.asarray(scale, jnp.float32))
    step = jax.jit(tx().update)
    updates, state = step(PARAMS, state, PARAMS)
    assert all(not jnp.any(update) for update in jax.tree.leaves(updates))
    assert last_step(state).skipped
    assert 2.0**-24 <= scale_of(state) <= 2.0**64
    _, state = step(PARAMS, state, PARAMS)
    assert last_step(state).applied


def test_plain_numbers_in_a_state_are_as_good_as_arrays():
    """Some formats of checkpoints return them."""
    state = damaged("scaling.scale", 8.0)
    _, state = jax.jit(tx().update)(PARAMS, replace(state, steps=3), PARAMS)
    assert last_step(state).applied


def test_the_state_of_another_model_is_refused():
    """Also if gradients and parameters agree with each other."""
    state = tx().init({"w": jnp.ones(2)})
    with pytest.raises(StructureError, match="No parameter for"):
        tx().update(PARAMS, state, PARAMS)


def test_the_state_of_other_settings_is_refused():
    """Gradients are scaled by the state's policy, and unscaled by the update's."""
    other = loss_scaled(optax.adam(1e-3), buoy.Backoff(growth_interval=7))
    with pytest.raises(StructureError, match="growth_interval=7.*growth_interval=2000"):
        tx().update(PARAMS, other.init(PARAMS), PARAMS)


@pytest.mark.slow
def test_the_last_step_inside_of_jit_is_refused():
    """With what to use there."""
    state = tx().init(PARAMS)
    _, state = tx().update(PARAMS, state, PARAMS)
    feed = buoy.jax.Feed(None)
    for call in (lambda s: last_step(s).applied, lambda s: repr(last_step(s)), feed):
        with pytest.raises(buoy.BuoyError, match="inside `jit`.*applied_of"):
            jax.jit(call)(state)


@pytest.mark.parametrize("held", [None, 1, [], {"model": 1}, {1: 2}])
def test_damaged_flax_states_are_refused(held):
    """By kind and content."""
    serialization = pytest.importorskip("flax.serialization")
    with pytest.raises(
        StructureError, match="The saved state is not a LossScaledState"
    ):
        serialization.from_state_dict(tx().init(PARAMS), held)
