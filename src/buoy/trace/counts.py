"""How many of a tensor's gradients lie in each binade, and how that is packed.

Of the *scaled* gradients, as the backward pass left them: what the format made of them
shows only there.  The scale is kept beside them, so the unscaled ones are a shift away.
"""

import struct
import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from buoy._core.errors import TraceError

__all__ = ["Counts", "Kind", "Shot", "pack", "unpack", "unpacked_size"]

Kind = Literal["weight", "activation"]

_HEAD = struct.Struct("<IhHII")  # tensor, low, bins, zeros, nonfinite
_MOST = 2**32 - 1
_MOST_BINS = 4096  # float64 spans 2098
_BIAS = 127
_WORD = "I" if array("I").itemsize == 4 else "L"  # four bytes


@dataclass(frozen=True, slots=True)
class Counts:
    """The number of one tensor's scaled gradients in each binade.

    A binade is a factor of two: `counts[i]` counts magnitudes from 2^(low+i) up to
    2^(low+i+1).  Large tensors
    are sampled: `size` is the number of elements of the tensor, `looked_at` the number
    that was counted.

    Example:
        >>> seen = Counts(low=-25, counts=(1, 2, 3), zeros=4, size=10)
        >>> seen.looked_at, seen.zero_share, seen.below(-24), seen.amax_log2
        (10, 0.4, 0.1, -22)
    """

    low: int
    counts: tuple[int, ...]
    zeros: int = 0
    nonfinite: int = 0
    size: int = 0
    kind: Kind = "weight"

    @classmethod
    def of_exponents(
        cls, bins: Sequence[float], size: int, kind: Kind = "weight"
    ) -> "Counts":
        """Create them from the 256 counts of float32's exponent field.

        Example:
            >>> bins = [0] * 256
            >>> bins[0], bins[127], bins[255] = 5, 2, 1
            >>> Counts.of_exponents(bins, size=8)
            Counts(low=0, counts=(2,), zeros=5, nonfinite=1, size=8, kind='weight')
        """
        whole = tuple(map(int, bins))
        low = 1
        high = 255
        while low < high and not whole[low]:
            low += 1
        while high > low and not whole[high - 1]:
            high -= 1
        kept = whole[low:high]
        return cls(low - _BIAS if kept else 0, kept, whole[0], whole[255], size, kind)

    @property
    def looked_at(self) -> int:
        """The number of elements that were counted."""
        return self.zeros + self.nonfinite + sum(self.counts)

    @property
    def zero_share(self) -> float:
        """The share of elements that are exactly zero, by underflow or by nature."""
        return self.zeros / self.looked_at if self.looked_at else 0.0

    def below(self, log2: float) -> float:
        """The share of all elements that is not zero but smaller than 2^log2.

        Exact for whole numbers; within a binade, assumed to be uniform in log2.
        """
        place = log2 - self.low
        looked_at = self.looked_at
        if not looked_at or not place > 0.0:
            return 0.0
        if place >= len(self.counts):
            return sum(self.counts) / looked_at
        whole = int(place)
        under = sum(self.counts[:whole]) + self.counts[whole] * (place - whole)
        return under / looked_at

    @property
    def amax_log2(self) -> int | None:
        """Upper edge of the highest binade that holds anything; None if all are 0."""
        return self.low + len(self.counts) if any(self.counts) else None


@dataclass(frozen=True, slots=True)
class Shot:
    """The sizes of the scaled gradients at one step."""

    step: int
    scale: float
    tensors: Mapping[str, Counts]


def unpacked_size(tensors: Mapping[str, Counts]) -> int:
    """Return how many bytes these took before they were packed."""
    return sum(_HEAD.size + 4 * len(seen.counts) for seen in tensors.values())


def pack(tensors: Mapping[int, Counts]) -> bytes:
    """Pack the counts of several tensors, by the tensors' numbers."""
    parts = []
    for number, seen in tensors.items():
        counts = array(_WORD, [min(c, _MOST) for c in seen.counts])
        parts += [
            _HEAD.pack(
                number,
                seen.low,
                len(counts),
                min(seen.zeros, _MOST),
                min(seen.nonfinite, _MOST),
            ),
            _little(counts).tobytes(),
        ]
    return zlib.compress(b"".join(parts), 6)


def unpack(
    packed: bytes, known: Mapping[int, tuple[str, int, Kind]], most: int = 2**26
) -> dict[str, Counts]:
    """Unpack what `pack` packed, if it is at most so many bytes.

    `known` tells each number's name, size and kind.
    """
    data = _unpacked(packed, most)
    found: dict[str, Counts] = {}
    numbers: set[int] = set()
    at = 0
    while at < len(data):
        if at + _HEAD.size > len(data):
            raise TraceError("a histogram ends too early")
        number, low, bins, zeros, nonfinite = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        if number not in known or bins > _MOST_BINS or at + 4 * bins > len(data):
            raise TraceError("a histogram is of an unknown tensor or ends too early")
        name, size, kind = known[number]
        if number in numbers:
            raise TraceError("a histogram counts a tensor twice")
        numbers.add(number)
        counts = array(_WORD, data[at : at + 4 * bins])
        at += 4 * bins
        found[name] = Counts(low, tuple(_little(counts)), zeros, nonfinite, size, kind)
    return found


def _unpacked(packed: bytes, most: int) -> bytes:
    """Unpack within bounds: a small file must not fill the memory."""
    worker = zlib.decompressobj()
    try:
        data = worker.decompress(packed, max(most, 1))
    except zlib.error as error:
        message = f"a histogram is damaged ({error})"
        raise TraceError(message) from error
    if worker.unconsumed_tail or not worker.eof:
        raise TraceError("a histogram is damaged or larger than any run makes it")
    return data


def _little(counts: "array[int]") -> "array[int]":
    import sys  # noqa: PLC0415

    if sys.byteorder == "big":  # pragma: no cover - needs such a machine
        counts.byteswap()
    return counts
