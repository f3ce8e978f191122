"""Small real trainings in FP32 and FP16, side by side: what `buoy demo` runs."""

from buoy._core.errors import MissingBackendError

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    message = (
        "The demo trains with PyTorch, which is not installed. Install it with "
        "`pip install 'buoy-amp[torch]'`."
    )
    raise MissingBackendError(message) from error

__all__: list[str] = []
