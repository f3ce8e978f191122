"""TensorFlow without Keras 3: a `LossScaler` for custom loops and for tf_keras.

Example::

    scaler = buoy.tensorflow.LossScaler(policy="headroom")
    with tf.GradientTape() as tape:
        loss = scaler.scale(compute_loss())
    scaler.apply(optimizer, tape.gradient(loss, variables), variables)
"""

from buoy._core.errors import MissingBackendError

try:
    import tensorflow as tf  # noqa: F401
except ImportError as error:
    message = (
        f"`buoy.tensorflow` needs TensorFlow: {error}. Install it with "
        "`pip install 'buoy-amp[tensorflow]'`."
    )
    raise MissingBackendError(message) from error

from buoy._core.errors import CallOrderError, OptionError
from buoy.tensorflow.scaler import LossScaler

__all__ = ["CallOrderError", "LossScaler", "OptionError"]
