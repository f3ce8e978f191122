"""FP16, BF16 and FP8 arithmetic for torch models on any CPU.

Example::

    with buoy.emulate.emulate("fp16"):  # forward and backward, of a float32 model
        scaler.scale(loss_fn(model(x), y)).backward()
"""

from buoy._core.errors import MissingBackendError

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    message = (
        "`buoy.emulate` needs PyTorch, which is not installed. Install it with "
        "`pip install 'buoy-amp[torch]'`."
    )
    raise MissingBackendError(message) from error

from buoy.emulate.errors import StepInsideError, UnknownOperatorError
from buoy.emulate.mode import emulate, fp32
from buoy.emulate.operators import AUTOCAST, LOSSES
from buoy.emulate.rounding import round_to

__all__ = [
    "AUTOCAST",
    "LOSSES",
    "StepInsideError",
    "UnknownOperatorError",
    "emulate",
    "fp32",
    "round_to",
]
