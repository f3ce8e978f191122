"""Transformations that get scaled gradients are reported; right nestings are not."""

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import buoy
from buoy.jax import (
    BuoyWarning,
    applied_of,
    last_step,
    loss_scaled,
    master_weights,
    scale_of,
    value_and_grad,
)

PARAMS = {"a": jnp.ones(2), "b": jnp.full(2, 2.0)}
LABELS = {"a": "one", "b": "other"}
CLIP, FREEZE = optax.clip_by_global_norm(1.0), optax.set_to_zero()


def scaled(inner=None):
    return loss_scaled(inner or optax.sgd(0.1), "backoff")


def loss_fn(params):
    return sum(jnp.sum(w**2) for w in params.values())


def warned(call, *args):
    """Return what a call warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(*args)
    return [str(one.message) for one in caught]


WRONG = {
    "chain": (
        optax.chain(CLIP, scaled()),
        "number 2 in an `optax.chain`",
        "max_norm=1.0",
    ),
    "last of three": (
        optax.chain(CLIP, optax.trace(0.9), scaled()),
        "number 3 in an `optax.chain`",
        "loss_scaled(optax.chain(",
    ),
    "chain in a chain": (
        optax.chain(optax.chain(CLIP, optax.identity()), optax.chain(scaled())),
        "number 2 in an `optax.chain`",
        "max_norm=1.0",
    ),
    "masters around": (
        optax.chain(CLIP, master_weights(scaled())),
        "number 2 in an `optax.chain`",
        "max_norm=1.0",
    ),
    "injected": (
        optax.inject_hyperparams(
            lambda rate: optax.chain(CLIP, scaled(optax.sgd(rate)))
        )(rate=0.1),
        "number 2 in an `optax.chain`",
        "max_norm=1.0",
    ),
    "named chain": (
        optax.named_chain(("z_clip", CLIP), ("a_scaled", scaled())),
        "number 2 in an `optax.named_chain`",
        "max_norm=1.0",
    ),
    "masked": (
        optax.masked(scaled(), {"a": True, "b": False}),
        "gradients outside of the mask are not divided",
        "loss_scaled(optax.masked(",
    ),
    "partition": (
        optax.partition({"one": scaled(), "other": optax.sgd(0.1)}, LABELS),
        "those of 'other' stay multiplied",
        "loss_scaled(optax.partition(",
    ),
    "conditional": (
        optax.conditionally_transform(scaled(), lambda step: step > 0),
        "in the steps that it leaves out",
        "loss_scaled(optax.conditionally_transform(",
    ),
    "accumulation": (
        optax.MultiSteps(scaled(), 2),
        "its sum stays NaN",
        "loss_scaled(optax.MultiSteps(",
    ),
    "finite check": (
        optax.apply_if_finite(scaled(), 5),
        "the scale does not fall",
        "Remove it",
    ),
    "two at once": (
        optax.MultiSteps(optax.chain(CLIP, scaled()), 2),
        "its sum stays NaN",
        "loss_scaled(optax.MultiSteps(",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_nesting_is_reported_once_with_its_remedy(name):
    """While the step is traced, where the gradients are made."""
    tx, wrong, remedy = WRONG[name]
    state = tx.init(PARAMS)
    differentiate = jax.jit(value_and_grad(loss_fn))

    (message,) = warned(differentiate, state, PARAMS)

    assert wrong in message
    assert remedy in message
    assert warned(differentiate, state, PARAMS) == []


@pytest.mark.parametrize("reader", [scale_of, applied_of, value_and_grad(loss_fn)])
def test_a_wrong_nesting_is_reported_at_the_line_that_reads_the_state(reader):
    args = (PARAMS,) if reader not in (scale_of, applied_of) else ()
    state = optax.chain(CLIP, scaled()).init(PARAMS)

    with pytest.warns(BuoyWarning, match="number 2") as caught:
        reader(state, *args)

    assert [one.filename for one in caught] == [__file__]


@pytest.mark.parametrize("name", ["TrainState", "nnx.Optimizer", "tuple of a loop"])
def test_a_wrong_nesting_is_reported_inside_of_other_trees(name):
    """What surrounds the optimizer's state is searched, too."""
    tx = optax.chain(CLIP, scaled())
    if name == "TrainState":
        tree = TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    elif name == "nnx.Optimizer":
        model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        tree = nnx.Optimizer(model, tx, wrt=nnx.Param)
    else:
        tree = (PARAMS, tx.init(PARAMS))

    (message,) = warned(scale_of, tree)

    assert "number 2 in an `optax.chain`" in message


RIGHT = {
    "alone": scaled(),
    "chain inside": scaled(optax.chain(CLIP, optax.adam(0.1))),
    "first in a chain": optax.chain(scaled(), CLIP, optax.ema(0.9)),
    "first in a named chain": optax.named_chain(("z", scaled()), ("a", CLIP)),
    "mask inside": scaled(optax.masked(optax.sgd(0.1), {"a": True, "b": False})),
    "frozen others": optax.partition({"one": scaled(), "other": FREEZE}, LABELS),
    "selected": optax.selective_transform(
        scaled(), freeze_mask={"a": False, "b": True}
    ),
    "partition inside": scaled(
        optax.partition({"one": optax.adam(0.1), "other": optax.sgd(0.1)}, LABELS)
    ),
    "accumulation inside": scaled(optax.MultiSteps(optax.sgd(0.1), 2)),
    "masters inside": scaled(master_weights(optax.adam(0.1))),
    "masters around": master_weights(scaled()),
    "injected": optax.inject_hyperparams(lambda rate: scaled(optax.sgd(rate)))(0.1),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_nesting_is_not_reported(name):
    state = RIGHT[name].init(PARAMS)

    assert warned(jax.jit(value_and_grad(loss_fn)), state, PARAMS) == []
    assert (
        warned(
            scale_of, TrainState.create(apply_fn=None, params=PARAMS, tx=RIGHT[name])
        )
        == []
    )


@pytest.mark.parametrize(
    "tree",
    [
        lambda state: (PARAMS, state),
        lambda state: ([jnp.ones(2)], {"rng": jax.random.key(0)}, state),
        lambda state: {"params": PARAMS, "opt_state": state},
        lambda state: (((jnp.ones(2), jnp.ones(2)),), state),
    ],
    ids=["parameters", "lists and keys", "dict", "tuples of arrays"],
)
def test_a_tree_that_is_not_a_chain_is_not_reported(tree):
    """What stands before the state in a loop's own tuple transforms nothing."""
    assert warned(scale_of, tree(scaled().init(PARAMS))) == []


def test_what_is_reported_does_stop_training_and_the_remedies_do_not():
    """The message is true: the same 30 steps, with clipping in three places."""
    start = {"w": jnp.full(4, 0.5)}
    target = jnp.arange(4.0)
    loss_fn = lambda params: jnp.mean((params["w"] - target) ** 2)  # noqa: E731

    def trained(tx):
        @jax.jit
        def step(params, state):
            loss, grads = value_and_grad(loss_fn)(state, params)
            updates, state = tx.update(grads, state, params, value=loss)
            return optax.apply_updates(params, updates), state

        params, state = start, tx.init(start)
        for _ in range(30):
            params, state = step(params, state)
        assert last_step(state).applied
        return float(loss_fn(params))

    sgd, policy = optax.sgd(0.1), buoy.Static(init_scale=2.0**16)
    with pytest.warns(BuoyWarning, match="training stops"):
        wrong = trained(optax.chain(CLIP, loss_scaled(sgd, policy)))
    inside = trained(loss_scaled(optax.chain(CLIP, sgd), policy))
    own = trained(loss_scaled(sgd, policy, max_norm=1.0))

    assert wrong == pytest.approx(float(loss_fn(start)), rel=1e-3)
    assert inside < 0.5 * wrong
    assert own == pytest.approx(inside, rel=1e-4)
