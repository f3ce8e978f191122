"""How much of the gradients is lost, as numbers and in words."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

__all__ = ["Share", "Underflow", "joined", "summed"]


@dataclass(frozen=True, slots=True)
class Share:
    """The number of gradient values, and the shares of them that are lost.

    Values that are exactly zero without rounding do not count.

    Example:
        >>> Share(count=100, zero=0.25, subnormal=0.5).zero
        0.25
    """

    count: int
    zero: float  # became 0
    subnormal: float  # kept fewer digits than FP16 has

    @classmethod
    def of(cls, count: int, zeros: float, subnormals: float) -> Self:
        """Make it from the numbers of values that are lost."""
        if not count:
            return cls(0, 0.0, 0.0)
        return cls(count, zeros / count, subnormals / count)


@dataclass(frozen=True, slots=True)
class Underflow:
    """The share of gradient values that is lost at a scale, and where.

    `zero` is the share that became 0, `subnormal` the share that lost digits, of the
    parameters' gradient values that are not exactly 0 without rounding.  `parameters`
    and `activations` (the gradients that arrive at each module's output, if requested)
    map names to `Share`.

    Example:
        >>> print(Underflow(1.0, 0.25, 0.5, {"weight": Share(4, 0.25, 0.5)}))
        At scale 1, 25.00% of the gradient values become 0 and 50.00% lose digits.
          weight: 25.00% and 50.00%
    """

    scale: float
    zero: float
    subnormal: float
    parameters: dict[str, Share] = field(default_factory=dict)
    activations: dict[str, Share] = field(default_factory=dict)

    def worst(self, most: int = 5) -> list[tuple[str, Share]]:
        """Return the names of the parameters that lose most, worst first."""
        ranked = sorted(
            self.parameters.items(),
            key=lambda item: (-item[1].zero, -item[1].subnormal),
        )
        return ranked[:most]

    def __str__(self) -> str:
        told = (
            f"At scale {self.scale:g}, {self.zero:.2%} of the gradient values become 0 "
            f"and {self.subnormal:.2%} lose digits."
        )
        worst = [
            f"\n  {name}: {share.zero:.2%} and {share.subnormal:.2%}"
            for name, share in self.worst()
            if share.zero or share.subnormal
        ]
        return told + "".join(worst)


def summed(
    scale: float, parameters: dict[str, Share], activations: dict[str, Share]
) -> Underflow:
    """Add up what each parameter lost."""
    total = joined(parameters.values())
    return Underflow(scale, total.zero, total.subnormal, parameters, activations)


def joined(shares: Iterable[Share]) -> Share:
    """Make one share of several: that of all their values together."""
    every = list(shares)
    return Share.of(
        sum(share.count for share in every),
        sum(share.zero * share.count for share in every),
        sum(share.subnormal * share.count for share in every),
    )
