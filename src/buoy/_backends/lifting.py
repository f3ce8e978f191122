"""Take a state from plain numbers onto a backend, and back."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from buoy._core.errors import MissingBackendError
from buoy._core.state import map_state, parts

__all__ = ["lift"]

_BACKENDS = ("numpy", "torch", "jax", "tensorflow")


def lift(policy: Any, state: Any, backend: str, **placement: Any) -> Any:
    """Turn a state's plain numbers into scalars of one of the backends.

    These are "numpy", "torch", "jax" and "tensorflow".

    `placement` is torch's `device`.  On JAX the classes of the state become pytrees.

    Example:
        >>> import buoy
        >>> policy = buoy.policy("backoff")
        >>> lift(policy, policy.init(), "numpy").scale
        np.float32(65536.0)
    """
    if backend not in _BACKENDS or find_spec(backend) is None:
        message = (
            f"No backend {backend!r} to lift a state onto: it must be one of "
            f"{', '.join(_BACKENDS)}, and installed "
            f"(`pip install 'buoy-amp[{backend}]'`)."
        )
        raise MissingBackendError(message)
    module = import_module(f"buoy._backends.{backend}")
    if backend == "jax":
        for part in parts(state):
            module.register(type(part))
    return map_state(
        lambda value: module.lift(value, policy.precision, **placement), state
    )
