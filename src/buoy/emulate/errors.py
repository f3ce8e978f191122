"""What can go wrong with an emulation."""

from buoy._core.errors import BuoyError

__all__ = ["StepInsideError", "UnknownOperatorError"]


class UnknownOperatorError(BuoyError, LookupError):
    """`keep` names an operator that torch does not have."""

    def __init__(self, name: object) -> None:
        message = (
            f"`keep` names operators of `torch.ops.aten`, such as 'softmax', or is "
            f"buoy.emulate.AUTOCAST or LOSSES; torch has no operator {name!r}."
        )
        super().__init__(message)


class StepInsideError(BuoyError, RuntimeError):
    """An optimizer stepped inside `emulate`, where everything is rounded."""

    def __init__(self, optimizer: object, number_format: str) -> None:
        message = (
            f"{type(optimizer).__name__}.step() was called inside "
            f"emulate({number_format!r}), which would round the weights and the "
            "optimizer's state as well. Nothing was stepped. Keep the forward and the "
            "backward pass inside, and unscale, clip and step outside of it."
        )
        super().__init__(message)
