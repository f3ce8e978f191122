"""Number formats and their limits for overflow and underflow."""

from dataclasses import dataclass
from math import log2

from buoy._core.errors import PolicyError

__all__ = [
    "FLOAT32_MAX",
    "FLOAT32_TINY",
    "FORMATS",
    "FP16_MAX_LOG2",
    "Format",
    "number_format",
]


@dataclass(frozen=True, slots=True)
class Format:
    """A binary floating-point format, given by its bits and its largest exponent.

    Example:
        >>> FORMATS["fp16"].max
        65504.0
        >>> FORMATS["fp16"].overflows(65520.0), FORMATS["fp16"].underflows(2.0**-25)
        (True, True)
    """

    name: str
    exponent_bits: int
    mantissa_bits: int  # stored ones, without the leading 1
    bias: int
    max: float
    has_inf: bool
    summary: str = ""

    @property
    def smallest_normal(self) -> float:
        """Smallest number with full precision."""
        return 2.0 ** (1 - self.bias)

    @property
    def smallest_subnormal(self) -> float:
        """Smallest number above zero."""
        return 2.0 ** (1 - self.bias - self.mantissa_bits)

    @property
    def max_log2(self) -> float:
        """log2 of the largest finite number."""
        return log2(self.max)

    @property
    def needs_scaling(self) -> bool:
        """Whether gradients need scaling; the range is smaller than float32's."""
        return self.exponent_bits < 8

    def overflows(self, x: float) -> bool:
        """Return whether x, rounded to nearest even, overflows.

        A format without infinities saturates or yields NaN there.  NaN overflows too.
        """
        last_gap = 2.0 ** (_exponent(self.max) - self.mantissa_bits)
        tie_goes_up = (self.max / last_gap) % 2 == 1
        limit = self.max + last_gap / 2
        size = abs(x)
        return not (size < limit or (size == limit and not tie_goes_up))

    def underflows(self, x: float) -> bool:
        """Return whether a nonzero x is rounded to zero."""
        return 0.0 < abs(x) <= self.smallest_subnormal / 2


def _exponent(x: float) -> int:
    return int(x.hex().partition("p")[2])


FLOAT32_MAX = float.fromhex("0x1.fffffep+127")
FP16_MAX_LOG2 = log2(65504.0)
FLOAT32_TINY = 2.0**-126

_ROWS = (
    Format("fp32", 8, 23, 127, FLOAT32_MAX, True, "IEEE single"),
    Format("fp16", 5, 10, 15, 65504.0, True, "IEEE half"),
    Format("bf16", 8, 7, 127, float.fromhex("0x1.fep+127"), True, "float32's range"),
    Format("fp8_e4m3fn", 4, 3, 7, 448.0, False, "FP8 for weights: no inf, one NaN"),
    Format("fp8_e4m3", 4, 3, 7, 240.0, True, "FP8 after IEEE's rules"),
    Format("fp8_e5m2", 5, 2, 15, 57344.0, True, "FP8 for gradients"),
)

FORMATS: dict[str, Format] = {row.name: row for row in _ROWS}

_OTHER_NAMES = {
    "float32": "fp32",
    "float": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8_e4m3fn",
    "float8_e4m3": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
}


def number_format(name: object) -> Format:
    """Return a format by our name or a framework's dtype name.

    Example:
        >>> number_format("torch.float16").name
        'fp16'
    """
    if isinstance(name, Format):
        return name
    if not isinstance(name, str):
        message = f"A number format is named by a string, got {name!r}."
        raise PolicyError(message)
    key = name.rpartition(".")[2].lower()
    key = _OTHER_NAMES.get(key, key)
    if key not in FORMATS:
        message = f"No number format named {name!r}. Known: {', '.join(FORMATS)}."
        raise PolicyError(message)
    return FORMATS[key]
