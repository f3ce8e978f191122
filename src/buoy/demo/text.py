"""A little text to learn from, bundled."""

from dataclasses import dataclass
from importlib.resources import files

import torch

__all__ = ["Letters"]

_HELD_OUT = 0.1


@dataclass(frozen=True, slots=True)
class Letters:
    """A text as numbers, its last tenth held out.

    Example:
        >>> text = Letters.bundled()
        >>> text.alphabet[-3:], len(text.numbers)
        ('wxy', 4309)
    """

    alphabet: str
    numbers: torch.Tensor

    @classmethod
    def bundled(cls) -> "Letters":
        """Read the text that comes with the package."""
        text = files("buoy").joinpath("data", "sonnets.txt").read_text("ascii").lower()
        alphabet = "".join(sorted(set(text)))
        return cls(alphabet, torch.tensor([alphabet.index(letter) for letter in text]))

    def rows(self, count: int, length: int, source: torch.Generator) -> torch.Tensor:
        """Draw rows of letters to learn from."""
        return self._drawn(0, self._border, count, length, source)

    def held_out(
        self, count: int, length: int, source: torch.Generator
    ) -> torch.Tensor:
        """Draw rows of letters that are never learned from."""
        return self._drawn(self._border, len(self.numbers), count, length, source)

    @property
    def _border(self) -> int:
        return int((1.0 - _HELD_OUT) * len(self.numbers))

    def _drawn(
        self, start: int, end: int, count: int, length: int, source: torch.Generator
    ) -> torch.Tensor:
        places = torch.randint(start, end - length, (count,), generator=source)
        return self.numbers[places[:, None] + torch.arange(length)]
