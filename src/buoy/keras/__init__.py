"""Keras 3, on TensorFlow, JAX and torch: a `LossScaleOptimizer` with any policy.

Example::

    model.compile(buoy.keras.LossScaleOptimizer("adamw", policy="headroom"), "mse")
    model.fit(x, y, callbacks=[buoy.keras.Watch(trace="run.buoy")])
"""

from buoy._core.errors import MissingBackendError

try:
    import keras as _keras  # noqa: F401
except ImportError as error:
    message = (
        f"`buoy.keras` needs Keras 3: {error}. Install it with "
        "`pip install 'buoy-amp[keras]'`, and one of TensorFlow, JAX and torch."
    )
    raise MissingBackendError(message) from error

from buoy._core.errors import (
    BuoyWarning,
    CallOrderError,
    OptionError,
    StuckError,
    StuckWarning,
)
from buoy._core.watch import Stuck
from buoy.keras.layers import first_nonfinite
from buoy.keras.optimizer import LossScaleOptimizer
from buoy.keras.use import use
from buoy.keras.watch import Watch

__all__ = [
    "BuoyWarning",
    "CallOrderError",
    "LossScaleOptimizer",
    "OptionError",
    "Stuck",
    "StuckError",
    "StuckWarning",
    "Watch",
    "first_nonfinite",
    "use",
]
