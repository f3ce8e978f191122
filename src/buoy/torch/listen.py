"""Who may look on while a scaler works: recorders, meters, whoever comes next."""

from typing import TYPE_CHECKING, Any, Protocol

from buoy.torch.gather import Gathered
from buoy.torch.rule import Evidence

if TYPE_CHECKING:
    from buoy.torch.contract import Contract
    from buoy.torch.step import LastStep

__all__ = ["Listener"]


class Listener(Protocol):
    """Looks at gradients while they are scaled, and hears what became of the step."""

    def look(
        self,
        scaler: "Contract",
        optimizer: Any,
        record: dict[str, Any],
        gathered: Gathered,
    ) -> None:
        """See an optimizer's gradients, whole and still scaled; write nothing.

        `record` is what the scaler notes of this iteration, e.g. `norm` (unscaled) and
        `amax` (scaled) where they are measured anyway.  Reading a value would wait for
        the device.
        """

    def concluded(
        self, scaler: Any, stepped: "list[LastStep]", evidence: Evidence | None
    ) -> None:
        """Hear that `update` has moved the scale.  This must not raise."""
