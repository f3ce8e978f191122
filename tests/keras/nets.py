"""What the tests of Keras share: a backend, a small model, its data."""

import keras
import numpy as np

from buoy.keras import LossScaleOptimizer

BACKEND = keras.backend.backend()
BATCH, BATCHES = 8, 12


def net(dtype="mixed_float16"):
    """Make two dense layers with the same weights each time."""
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(8, activation="tanh", dtype=dtype, name="first"),
            keras.layers.Dense(1, dtype=dtype, name="last"),
        ]
    )


def data(spoil=()):
    """Make batches; those to spoil overflow in FP16."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH * BATCHES, 4)).astype("float32")
    y = x[:, :1] * 2.0
    for batch in spoil:
        y[batch * BATCH] = np.inf
    return x, y


def without(batches):
    """Leave batches out of the data."""
    x, y = data()
    kept = [i for i in range(len(x)) if i // BATCH not in batches]
    return x[kept], y[kept]


def fitted(optimizer, arrays, *, callbacks=(), epochs=1, **options):
    """Train; return the model."""
    model = net()
    model.compile(optimizer, "mse", **options)
    model.fit(
        *arrays,
        batch_size=BATCH,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    )
    return model


def weights(model):
    """Read a model's weights."""
    return [keras.ops.convert_to_numpy(v) for v in model.trainable_variables]


class Loop:
    """Apply gradients to one variable, compiled where the backend compiles."""

    def __init__(self, optimizer, size=3):
        self.optimizer = optimizer
        self.variable = keras.Variable(np.ones(size, "float32"), name="w")
        optimizer.build([self.variable])
        if BACKEND == "jax":
            import jax

            self._step = jax.jit(optimizer.stateless_apply)

    def apply(self, grads):
        """Take one step."""
        grads = [keras.ops.convert_to_tensor(np.asarray(grads, "float32"))]
        if BACKEND != "jax":
            self.optimizer.apply(grads, [self.variable])
            return
        (weight,), own = self._step(
            [v.value for v in self.optimizer.variables], grads, [self.variable.value]
        )
        self.variable.assign(weight)
        for variable, value in zip(self.optimizer.variables, own, strict=True):
            variable.assign(value)

    @property
    def weight(self):
        """Read the variable."""
        return keras.ops.convert_to_numpy(self.variable)


def scaled(policy=None, inner=None, **options):
    """Make an optimizer around plain SGD."""
    return LossScaleOptimizer(
        inner or keras.optimizers.SGD(0.5), policy=policy, **options
    )
