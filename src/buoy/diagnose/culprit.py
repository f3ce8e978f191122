"""The first non-finite value of a step, as numbers and in words."""

import math
from dataclasses import dataclass
from typing import Literal

__all__ = ["FP16_MAX", "Culprit", "Cure", "Part"]

FP16_MAX = 65504.0
Part = Literal["input", "module", "between", "loss"]
Cure = Literal["", "module", "model", "scale", "nothing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """The first result of a step that was not finite although its inputs were.

    `part` is "module" for a module's own computation, "between" for code of a module
    that runs between the modules that it contains, "loss" for code after the model, and
    "input" if the batch itself was not finite.  Sizes are the largest finite
    magnitudes; `needed` is the size of the result in FP32, if it was measured.

    `cured_by` is the change that made the step finite when it was tried: "module" for
    this module in FP32, "model" for the whole model in FP32, "scale" for a lower scale,
    "nothing" if none of them did, "" if nothing was tried.

    Example:
        >>> print(Culprit(module="blocks.3.mlp", kind="Linear", direction="forward",
        ...               input_amax=900.0, needed=131008.0, cured_by="module"))
        Forward, `blocks.3.mlp` (Linear): its output is not finite, while its input was
        (at most 900). In FP32 it reaches 131008, 1.0 bits above FP16's largest number,
        65504. No scale helps: the loss is scaled after it. With this module in FP32 the
        forward pass is finite: `buoy.torch.keep_fp32(model, "blocks.3.mlp")`. Or make
        its inputs or weights smaller.
    """

    module: str  # dotted name; "" is the model itself
    kind: str = ""  # its class
    direction: Literal["forward", "backward"]
    part: Part = "module"
    parameter: str = ""  # whose gradient it was, if it was a parameter's
    after: str = ""  # the module that ran before it, for "between"
    before: str = ""  # the module that it would have gone into
    dtype: str = ""
    input_amax: float | None = None  # backward: of the gradient that arrived
    output_amax: float | None = None  # backward: of the gradient that was passed on
    needed: float | None = None
    scale: float | None = None  # that the loss was multiplied by
    poisoned: tuple[str, ...] = ()  # parameters that are not finite themselves
    cured_by: Cure = ""

    @property
    def headroom(self) -> float | None:
        """Bits between `needed` and FP16's largest number; negative if above it."""
        if self.needed is None or not 0.0 < self.needed < math.inf:
            return None
        return math.log2(FP16_MAX / self.needed)

    @property
    def fitting_scale(self) -> float | None:
        """The largest power of two that the loss could have been multiplied by."""
        if self.direction == "forward" or self.scale is None or self.headroom is None:
            return None
        if self.headroom >= 0.0:
            return None  # it overflows inside, not in what can be seen
        return 2.0 ** math.floor(math.log2(self.scale) + self.headroom)

    def __str__(self) -> str:
        # Imported here: the words need what they are about.
        from buoy.diagnose.explain import explain  # noqa: PLC0415

        return explain(self)
