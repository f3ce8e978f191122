"""JAX: loss scaling as an optax transformation.

Example::

    tx = buoy.jax.loss_scaled(optax.adamw(3e-4), max_norm=1.0)
    opt_state = tx.init(params)
    loss, grads = buoy.jax.value_and_grad(loss_fn)(opt_state, params, batch)
    updates, opt_state = tx.update(grads, opt_state, params, value=loss)
"""

from buoy._core.errors import MissingBackendError
from buoy._core.watch import Stuck

try:
    import jax as _jax  # noqa: F401
    import optax as _optax  # noqa: F401
except ImportError as error:
    message = (
        f"`buoy.jax` needs JAX and optax: {error}. Install them with "
        "`pip install 'buoy-amp[jax]'`."
    )
    raise MissingBackendError(message) from error

from buoy.jax.cast import Dtypes, cast
from buoy.jax.errors import (
    BuoyWarning,
    IntegerLeafError,
    LossError,
    MissingAxisError,
    NoScaleError,
    NoStepError,
    OptionError,
    SeveralScalesError,
    StructureError,
    StuckError,
    StuckWarning,
    UnboundAxisError,
    UnhashablePolicyError,
)
from buoy.jax.find import scale_of
from buoy.jax.gradients import value_and_grad
from buoy.jax.masters import MasterState, master_weights
from buoy.jax.record import Feed
from buoy.jax.state import LossScaledState
from buoy.jax.step import applied_of, last_step
from buoy.jax.transform import loss_scaled

__all__ = [
    "BuoyWarning",
    "Dtypes",
    "Feed",
    "IntegerLeafError",
    "LossError",
    "LossScaledState",
    "MasterState",
    "MissingAxisError",
    "NoScaleError",
    "NoStepError",
    "OptionError",
    "SeveralScalesError",
    "StructureError",
    "Stuck",
    "StuckError",
    "StuckWarning",
    "UnboundAxisError",
    "UnhashablePolicyError",
    "applied_of",
    "cast",
    "last_step",
    "loss_scaled",
    "master_weights",
    "scale_of",
    "value_and_grad",
]
