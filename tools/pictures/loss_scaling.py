"""Draw docs/_static/loss_scaling.svg: gradients on FP16's number line.

    python tools/pictures/loss_scaling.py

The histogram is recorded: activation gradients of a small GPT, from the traces of
benchmarks/headroom.  Above as they are, below multiplied by the largest power of two
that leaves them one binade of space.
"""

import gzip
import json
from pathlib import Path

from svg import label, shape, write

ROOT = Path(__file__).parents[2]
TRACE = ROOT / "benchmarks/headroom/traces/fresh_gpt_wide.json.gz"
# Powers of two: what rounds to 0, has all digits, is infinite; the ends of the axis.
ZERO = -25
NORMAL = -14
TOP = 16
LOW = -52
HIGH = 26
# Pixels.
LEFT = 20
RIGHT = 740
HEIGHT = 88
GAP = 156
BANDS = [
    (LOW, ZERO, "#d33", 0.16, "becomes 0"),
    (ZERO, NORMAL, "#e90", 0.16, "loses digits"),
    (NORMAL, TOP, "#2a2", 0.13, "exact to 11 bits"),
    (TOP, HIGH, "#d33", 0.16, "becomes inf"),
]


def x(log2: float) -> float:
    """Place a power of two."""
    return LEFT + (log2 - LOW) / (HIGH - LOW) * (RIGHT - LEFT)


def box(a: float, b: float, y: float, height: float, style: str) -> str:
    """Draw a bar between two powers of two that stands on `y`."""
    corners = [(x(a), y), (x(a), y - height), (x(b), y - height), (x(b), y)]
    return shape("polygon", corners, style)


def panel(counts: list[float], low: int, shift: int, base: float) -> list[str]:
    """Draw the number line and the histogram, moved by `shift` binades."""
    parts = []
    for start, end, colour, opacity, text in BANDS:
        style = f'fill="{colour}" fill-opacity="{opacity}" stroke="none"'
        parts.append(box(start, end, base, HEIGHT + 14, style))
        parts.append(label((x(start) + x(end)) / 2, base - HEIGHT, text, "middle"))
    most = max(counts)
    for place, count in enumerate(counts):
        start = low + place + shift
        is_lost = start + 1 <= ZERO
        colour = "#b22" if is_lost else "#0b6bcb"
        fill = f'fill="{colour}" stroke="none"'
        height = (HEIGHT - 18) * count / most
        if height > 0.05:
            parts.append(box(start + 0.08, start + 0.92, base, height, fill))
    parts += [
        label(x(power), base + 17, f"2^{power}", "middle")
        for power in range(-48, 25, 8)
    ]
    return parts


def main() -> None:
    """Draw both panels and print the shares that the page names."""
    held = json.loads(gzip.decompress(TRACE.read_bytes()))["activations"]
    counts = held["counts"][-1]
    low = held["low"]
    top = low + max(i for i, count in enumerate(counts) if count) + 1
    shift = TOP - 1 - top
    parts = []
    for place, by in enumerate((0, shift)):
        base = 152 + place * GAP
        lost = share(counts, low + by, ZERO)
        weak = share(counts, low + by, NORMAL) - lost
        name = f"loss times 2^{by}" if by else "loss as it is"
        said = f"{name}: {lost:.2%} of the gradients become 0, {weak:.2%} lose digits"
        print(said)
        parts.append(label(LEFT, base - HEIGHT - 22, said, "start", "#333"))
        parts += panel(counts, low, by, base)
    title = "Gradients of a small GPT on FP16's number line"
    parts.append(label(LEFT, 18, title, "start", "#111"))
    write(ROOT / "docs/_static/loss_scaling.svg", parts)


def share(counts: list[float], low: int, limit: int) -> float:
    """Return the share below a power of two."""
    small = sum(n for place, n in enumerate(counts) if low + place + 1 <= limit)
    return small / sum(counts)


if __name__ == "__main__":
    main()
