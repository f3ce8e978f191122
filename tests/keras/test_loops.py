"""Loops of your own on each backend, and `train_step` of your own in `fit`."""

import keras
import numpy as np
import pytest

import buoy
from buoy.keras import LossScaleOptimizer, OptionError
from tests.keras.nets import BACKEND, BATCH, data, fitted, net, scaled, weights, without

FIXED = buoy.Static(init_scale=64.0)
mse = keras.losses.MeanSquaredError()


def tensorflow_step(model, optimizer):
    """Make the step of a loop with `GradientTape`."""
    import tensorflow as tf

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = mse(y, model(x, training=True))
            scaled_loss = optimizer.scale_loss(loss)
        variables = model.trainable_variables
        grads = tape.gradient(scaled_loss, variables)
        optimizer.apply_gradients(zip(grads, variables, strict=True))
        return loss

    return step


def torch_step(model, optimizer):
    """Make the step of a loop with torch's autograd."""
    import torch

    def step(x, y):
        model.zero_grad()
        loss = mse(y, model(x, training=True))
        optimizer.scale_loss(loss).backward()
        variables = model.trainable_variables
        with torch.no_grad():
            optimizer.apply([v.value.grad for v in variables], variables)
        return loss

    return step


def jax_step(model, optimizer):
    """Make the pure function of a loop with `value_and_grad`."""
    import jax

    def scaled_loss(trainable, rest, own, x, y):
        out, rest = model.stateless_call(trainable, rest, x, training=True)
        loss = mse(y, out)
        mapping = list(zip(optimizer.variables, own, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            return optimizer.scale_loss(loss), (loss, rest)

    compute = jax.value_and_grad(scaled_loss, has_aux=True)

    def step(state, x, y):
        trainable, rest, own = state
        (_, (loss, rest)), grads = compute(trainable, rest, own, x, y)
        trainable, own = optimizer.stateless_apply(own, grads, trainable)
        return loss, (trainable, rest, own)

    return step


class Custom(keras.Sequential):
    """A model with a `train_step` of its own."""

    if BACKEND == "jax":

        def train_step(self, state, data):
            """Take one step, as JAX needs it."""
            trainable, rest, own, metrics = state
            step = jax_step(self, self.optimizer)
            loss, (trainable, rest, own) = step((trainable, rest, own), *data)
            return {"loss": loss}, (trainable, rest, own, metrics)

    else:

        def train_step(self, data):
            """Take one step."""
            make = tensorflow_step if BACKEND == "tensorflow" else torch_step
            return {"loss": make(self, self.optimizer)(*data)}


def run_loop(model, optimizer, arrays):
    """Train without `fit`, compiled where the backend compiles."""
    optimizer.build(model.trainable_variables)
    batches = zip(*(np.split(a, len(a) // BATCH) for a in arrays), strict=True)
    if BACKEND != "jax":
        make = tensorflow_step if BACKEND == "tensorflow" else torch_step
        step = make(model, optimizer)
        if BACKEND == "tensorflow":
            import tensorflow as tf

            step = tf.function(step)
        for x, y in batches:
            step(keras.ops.array(x), keras.ops.array(y))
        return
    import jax

    step = jax.jit(jax_step(model, optimizer))
    held = [
        model.trainable_variables,
        model.non_trainable_variables,
        optimizer.variables,
    ]
    state = tuple([v.value for v in variables] for variables in held)
    for x, y in batches:
        _, state = step(state, x, y)
    for variables, values in zip(held, state, strict=True):
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)


@pytest.fixture(scope="module")
def clean():
    """Train on ten batches by `fit`; return the weights."""
    return weights(fitted(scaled(FIXED, "adam"), without({3, 7})))


@pytest.mark.parametrize("way", ["loop", "train_step"])
def test_loops_of_your_own_do_what_fit_does(way, clean):
    """The weights are those of `fit` without the two batches that overflow."""
    optimizer, arrays = scaled(FIXED, "adam"), data(spoil={3, 7})
    model = net()
    if way == "loop":
        run_loop(model, optimizer, arrays)
    else:
        model = Custom(net().layers)
        model.compile(optimizer)
        model.fit(*arrays, batch_size=BATCH, shuffle=False, verbose=0)

    skipped = [row.step for row in optimizer.rows() if not row.applied]
    assert skipped == [3, 7]
    for one, other in zip(weights(model), clean, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_stateless_apply_changes_no_variable():
    """Values in, values out; Keras has it on JAX and torch."""
    optimizer, weight = scaled(initial_scale=4.0), keras.Variable([1.0])
    optimizer.build([weight])
    place = [v.name for v in optimizer.variables].index("dynamic_scale")

    apply = optimizer.stateless_apply
    if BACKEND == "jax":
        import jax

        apply = jax.jit(apply)

    def step(grad):
        own = [keras.ops.copy(v) for v in optimizer.variables]
        return apply(own, [keras.ops.array([grad])], [keras.ops.copy(weight)])

    if BACKEND == "tensorflow":
        with pytest.raises(OptionError, match="no `stateless_apply` on TensorFlow"):
            step(4.0)
        return
    seen = []
    for grad in (4.0, np.inf):
        (value,), after = step(grad)
        numbers = [keras.ops.convert_to_numpy(x) for x in (value[0], after[place])]
        seen.append(tuple(map(float, numbers)))
    assert seen == [(0.5, 4.0), (1.0, 2.0)]
    assert float(weight.numpy()[0]) == 1.0
    assert optimizer.scale == 4.0
    assert optimizer.rows() == []


def test_only_public_names_of_keras_are_overridden():
    """Private ones may change in any release of Keras."""
    base = keras.optimizers.LossScaleOptimizer
    mine = [name for name in vars(LossScaleOptimizer) if name in dir(base)]
    private = [n for n in mine if n.startswith("_") and n not in dir(object)]

    assert "apply" in mine
    assert not [n for n in private if not n.startswith(("__", "_abc_", "_tf_"))]
