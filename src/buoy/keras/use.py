"""Put Buoy's optimizer where Keras would put its own."""

from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import Any, Self

import keras

from buoy._core.policies.policy import Policy
from buoy.keras.optimizer import LossScaleOptimizer

__all__ = ["Use", "use"]


class Use:
    """What `use` returns: undo it by `undo()`, or at the end of a `with` block."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self.undo = undo

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
    """Let `compile` take Buoy's optimizer where Keras would wrap in its own.

    That is under the dtype policy "mixed_float16", unless `auto_scale_loss=False`.
    An optimizer that you wrap yourself stays as it is.

    Example:
        >>> with use(policy="headroom"):
        ...     model = keras.Sequential([keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")  # in float32: not wrapped
        >>> type(model.optimizer).__name__
        'SGD'
    """
    stock = keras.Model.compile

    @wraps(stock)
    def compile_with_buoy(model: Any, *args: Any, **kwargs: Any) -> None:
        stock(model, *args, **kwargs)
        given = args[0] if args else kwargs.get("optimizer")
        wrapped = type(model.optimizer) is keras.optimizers.LossScaleOptimizer
        if wrapped and model.optimizer is not given:
            LossScaleOptimizer.adopt(model, policy)

    def undo() -> None:
        if keras.Model.compile is compile_with_buoy:
            keras.Model.compile = stock

    keras.Model.compile = compile_with_buoy
    return Use(undo)
