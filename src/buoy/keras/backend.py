"""The backend that Keras runs on: its numbers and its gradients."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

import keras

from buoy._core.advance import Found
from buoy._core.errors import OptionError
from buoy._core.ops import Ops, Scalar
from buoy._core.policies.policy import Policy

__all__ = [
    "Backend",
    "as_written",
    "backend",
    "in_stateless_scope",
    "is_half",
    "is_traced",
    "itself_as_written",
    "replica_now",
]

_F = TypeVar("_F", bound=Callable[..., Any])

_LOOKS = {"tensorflow": "", "jax": "", "torch": ".look"}  # the modules with `look`


@dataclass(frozen=True, slots=True)
class Backend:
    """The functions of a backend that the optimizer needs."""

    name: str
    ops: Ops
    lift: Callable[..., Any]
    look: Callable[..., Found]
    measure: Mapping[str, Callable[[Sequence[Any], Scalar], Scalar]]
    program_now: Callable[[], Any]  # what is traced, as `LossFlag` compares it

    def check(self, policy: Policy) -> None:
        """Raise for a policy that this backend cannot compute, e.g. in float64."""
        self.lift(1.0, policy.precision)


@cache
def backend() -> Backend:
    """Return the functions of the backend that Keras runs on."""
    name: str = keras.backend.backend()
    if name not in _LOOKS:
        raise OptionError(
            f"Keras runs on {name!r}, which cannot train. Set KERAS_BACKEND to one of "
            f"{', '.join(_LOOKS)} before Keras is imported."
        )
    home: Any = import_module(f"buoy._backends.{name}")
    looks: Any = import_module(f"buoy._backends.{name}{_LOOKS[name]}")
    program_now = getattr(home, "program_now", lambda: None)  # torch traces nothing
    return Backend(name, home.ops(), home.lift, looks.look, looks.MEASURE, program_now)


def as_written(function: _F) -> _F:
    """Keep a function out of TensorFlow's AutoGraph and of `torch.compile`."""
    return _kept(function, recursive=True)


def itself_as_written(function: _F) -> _F:
    """Do that for a function, but let `torch.compile` have those that it calls."""
    return _kept(function, recursive=False)


def _kept(function: _F, *, recursive: bool) -> _F:
    kept = function
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf  # noqa: PLC0415

        kept = tf.autograph.experimental.do_not_convert(function)
    elif keras.backend.backend() == "torch":
        import torch  # noqa: PLC0415

        disable: Any = torch.compiler.disable
        kept = disable(function, recursive=recursive)
    return kept


def in_stateless_scope() -> bool:
    """Return whether assignments to variables are recorded in place of being made."""
    with keras.StatelessScope(initialize_variables=False) as scope:
        return scope.original_scope is not None


def replica_now() -> int:
    """Return which replica of a `tf.distribute` strategy this code runs for."""
    if keras.backend.backend() != "tensorflow":
        return 0
    import tensorflow as tf  # noqa: PLC0415

    context = tf.distribute.get_replica_context()
    found = 0 if context is None else context.replica_id_in_sync_group
    return found if isinstance(found, int) else 0


def is_traced(tensors: Sequence[Any]) -> bool:
    """Return whether JAX is tracing these tensors."""
    if keras.backend.backend() != "jax":
        return False
    import jax  # noqa: PLC0415

    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tensors))


def is_half(tensor: object) -> bool:
    """Return whether a tensor or a variable is of float16."""
    dtype = getattr(tensor, "dtype", None)
    return dtype is not None and keras.backend.standardize_dtype(dtype) == "float16"
