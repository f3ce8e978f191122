"""Make `compile` use Buoy's optimizer in place of Keras' own."""

from functools import wraps
from types import TracebackType
from typing import Any, Self

import keras

from buoy._core.policies.policy import Policy
from buoy.keras.optimizer import LossScaleOptimizer

__all__ = ["Use", "use"]


_stock = keras.Model.compile
_active: list["Use"] = []  # the last one counts


class Use:
    """The result of `use`: undo it by `undo()`, or at the end of a `with` block."""

    def __init__(self, policy: str | Policy | None) -> None:
        self.policy = policy

    def undo(self) -> None:
        """Restore what `compile` did before; a second call does nothing."""
        if self in _active:
            _active.remove(self)
        if not _active and keras.Model.compile is _compile:
            keras.Model.compile = _stock

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.undo()


def use(policy: str | Policy | None = None) -> Use:
    """Make `compile` wrap optimizers in Buoy's class where Keras would use its own.

    That is under the dtype policy "mixed_float16", unless `auto_scale_loss=False`.
    An optimizer that you wrap yourself stays as it is.  The last call counts.

    Example:
        >>> with use(policy="headroom"):
        ...     model = keras.Sequential([keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")  # in float32: not wrapped
        >>> type(model.optimizer).__name__
        'SGD'
    """
    made = Use(policy)
    _active.append(made)
    keras.Model.compile = _compile
    return made


@wraps(_stock)
def _compile(model: Any, *args: Any, **kwargs: Any) -> None:
    _stock(model, *args, **kwargs)
    given = args[0] if args else kwargs.get("optimizer")
    wrapped = type(model.optimizer) is keras.optimizers.LossScaleOptimizer
    if wrapped and model.optimizer is not given and _active:
        LossScaleOptimizer.adopt(model, _active[-1].policy)
