"""Whether the losses of a step were finite, remembered from the loss to the step.

Front ends that keep their state in variables see the loss in one call and take the step
in another.  Both calls are made in one program, eager or traced: the flag is a tensor
of that program, held by Python until the step takes it, and needs no variable.
"""

from typing import Any

from buoy._core.ops import Scalar

__all__ = ["LossFlag"]


class LossFlag:
    """The flag of the losses since the last step, of each replica of a model.

    `program` is what the caller traces: the same (`==`) for the loss and the step, or
    the flag is a tensor of another program and cannot be used.

    Example:
        >>> flag = LossFlag()
        >>> flag.add(True, None), flag.add(False, None)
        (None, None)
        >>> flag.take(None), flag.take(None)
        (False, None)
        >>> flag.add(False, "one program")
        >>> flag.take("another") is None
        True
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[Any, Scalar]] = {}

    def add(self, finite: Scalar, program: Any, replica: int = 0) -> None:
        """Keep whether one more loss is finite."""
        before, held = self._held.get(replica, (None, None))
        known = held is not None and before == program
        self._held[replica] = (program, finite & held if known else finite)

    def take(self, program: Any, replica: int = 0) -> Scalar | None:
        """Return the flag of all losses, and forget it; None if it is not known."""
        before, held = self._held.pop(replica, (None, None))
        return held if before == program else None
