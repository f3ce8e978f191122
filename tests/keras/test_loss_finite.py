"""A policy that wants it is told whether the loss was finite before it was scaled."""

import keras
import numpy as np
import pytest

from tests.keras.nets import (
    BACKEND,
    BATCH,
    BATCHES,
    Loop,
    data,
    net,
    scaled,
)
from tests.keras.test_loops import run_loop
from tests.told import FINITE, NOT_FINITE, UNKNOWN, Told

BAD = [np.nan, np.inf, -np.inf]


def told_of(optimizer):
    """Return what the policy was told of the last step."""
    names = [variable.name for variable in optimizer.variables]
    value = optimizer.variables[names.index("policy_told")]
    return float(keras.ops.convert_to_numpy(value))


def spoiled(batch, value):
    """Make data whose loss in one batch has this value."""
    x, y = data()
    y[batch * BATCH] = value
    return x, y


class Tellings(keras.callbacks.Callback):
    """Keep what was told of each batch."""

    def __init__(self):
        super().__init__()
        self.told = []

    def on_train_batch_end(self, batch, logs=None):
        self.told.append(told_of(self.model.optimizer))


@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}, {"jit_compile": True}])
def test_fit_tells_of_every_loss(options):
    """On JAX, too, where the loss is inside a function that is differentiated."""
    if options.get("jit_compile") and BACKEND == "torch":
        pytest.skip("compiles for a minute; the scaler is never a part of it")
    model, seen = net(), Tellings()
    model.compile(scaled(Told(), "adam"), "mse", **options)
    x, y = spoiled(3, np.inf)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[seen])

    assert seen.told == [NOT_FINITE if i == 3 else FINITE for i in range(BATCHES)]


@pytest.mark.parametrize("value", BAD)
def test_a_loop_of_your_own_tells_of_the_loss(value):
    """The last batch is the bad one, as the state has only the last step's."""
    last = BATCHES - 1
    bad, good = scaled(Told()), scaled(Told())

    run_loop(net(), bad, spoiled(last, value))
    run_loop(net(), good, spoiled(last - 1, value))

    assert (told_of(bad), told_of(good)) == (NOT_FINITE, FINITE)


def test_without_a_loss_nothing_is_told():
    """And a loss counts for one step only."""
    loop = Loop(scaled(Told()))
    loop.apply([1.0, 1.0, 1.0])
    assert told_of(loop.optimizer) == UNKNOWN
    if BACKEND == "jax":
        return  # `Loop` compiles the step without the loss

    loop.optimizer.scale_loss(keras.ops.convert_to_tensor(np.nan))
    loop.apply([1.0, 1.0, 1.0])
    assert told_of(loop.optimizer) == NOT_FINITE
    loop.apply([1.0, 1.0, 1.0])
    assert told_of(loop.optimizer) == UNKNOWN


@pytest.mark.parametrize(
    "losses", [[1.0, np.nan, 2.0], [[1.0, -np.inf]], [[np.nan], 1]]
)
def test_one_bad_loss_among_several_counts(losses):
    """Several losses of one step, or one loss for each example."""
    optimizer, weight = scaled(Told()), keras.Variable([1.0])
    optimizer.build([weight])

    for loss in losses:
        optimizer.scale_loss(keras.ops.convert_to_tensor(loss))
    optimizer.apply([keras.ops.ones(1)], [weight])

    assert told_of(optimizer) == NOT_FINITE


def test_finite_losses_are_told_as_such_whatever_the_gradients():
    """An overflow of the backward pass says nothing of the loss, nor does the scale."""
    optimizer, weight = scaled(Told()), keras.Variable([1.0])
    optimizer.build([weight])

    scaled_loss = optimizer.scale_loss(keras.ops.convert_to_tensor(3e38))
    optimizer.apply([keras.ops.full((1,), np.nan)], [weight])

    assert np.isinf(keras.ops.convert_to_numpy(scaled_loss))
    assert told_of(optimizer) == FINITE
    assert not optimizer.last_step.applied


def test_a_loss_of_another_program_is_not_known():
    """It would be a tensor of that program; the step goes on without it."""
    optimizer, weight = scaled(Told()), keras.Variable([1.0])
    optimizer.build([weight])
    compiled = optimizer.scale_loss
    if BACKEND == "tensorflow":
        import tensorflow as tf

        compiled = tf.function(compiled)
    elif BACKEND == "jax":
        import jax

        compiled = jax.jit(jax.value_and_grad(compiled))
    else:
        pytest.skip("torch runs everything in one program")

    compiled(keras.ops.convert_to_tensor(np.nan))
    optimizer.apply([keras.ops.ones(1)], [weight])

    assert told_of(optimizer) == UNKNOWN


def test_who_does_not_want_it_pays_nothing():
    """No flag is made, and so none is combined."""
    optimizer, weight = scaled(Told(wants=frozenset())), keras.Variable([1.0])
    optimizer.build([weight])

    optimizer.scale_loss(keras.ops.convert_to_tensor(np.nan))
    optimizer.apply([keras.ops.ones(1)], [weight])

    assert told_of(optimizer) == UNKNOWN


def test_a_loss_inside_an_inner_function_is_not_known():
    """JAX alone: the flag would be a tracer of the inner function."""
    if BACKEND != "jax":
        pytest.skip("JAX differentiates functions")
    import jax

    optimizer, weight = scaled(Told()), keras.Variable([1.0])
    optimizer.build([weight])

    @jax.jit
    def step(own, weight):
        inner = jax.checkpoint(lambda w: optimizer.scale_loss(w[0] * np.inf))
        with keras.StatelessScope(list(zip(optimizer.variables, own, strict=True))):
            grads = jax.grad(inner)(weight)
        return optimizer.stateless_apply(own, [grads], [weight])

    own = [v.value for v in optimizer.variables]
    _, own = step(own, weight.value)
    for variable, value in zip(optimizer.variables, own, strict=True):
        variable.assign(value)

    assert told_of(optimizer) == UNKNOWN
