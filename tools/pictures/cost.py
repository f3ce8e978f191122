"""Draw docs/_static/cost.svg: what a clipped step costs against the size of a model.

    python tools/pictures/cost.py [--rounds N]

Both axes are logarithmic: a cost that is linear from some size on runs parallel to the
grey lines.  Measures in one thread, with Buoy and with torch's scaler in turns.
"""

import argparse
import math
import sys
from pathlib import Path

import torch
from svg import HEIGHT, WIDTH, label, shape, write

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.torch_step import SIZES, TENSORS, costs  # noqa: E402

COLOURS = {"torch": "#b35900", "buoy": "#0b6bcb"}
DASHES = {"torch": "6 3", "buoy": ""}
# Margins, and the gap between the two charts.
TOP = 56
BOTTOM = 52
LEFT = 56
GAP = 56
# The ends of the axis: powers of ten, in milliseconds.
LOW = -1.0
HIGH = 2.0

Points = list[tuple[float, float]]


def main() -> None:
    """Measure and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    half = (WIDTH - LEFT - GAP - 20) / 2
    parts = [label(LEFT, 22, "A step with clipping and fused AdamW on a CPU", "start")]
    for left, title, shapes, count in (
        (LEFT, "tensors of 1,000 elements", TENSORS, lambda s: s[0]),
        (LEFT + half + GAP, "elements, in 10 tensors", SIZES, lambda s: s[0] * s[1]),
    ):
        measured = {shape: costs(shape, rounds) for shape in shapes}
        lines = {
            name: [(math.log10(count(s)), ms[name]) for s, ms in measured.items()]
            for name in COLOURS
        }
        parts += panel(title, lines, left, half)
    write(ROOT / "docs/_static/cost.svg", parts)


def panel(title: str, lines: dict[str, Points], left: float, width: float) -> list[str]:
    """Draw one chart."""
    first, _ = lines["buoy"][0]
    last, _ = lines["buoy"][-1]

    def x(power: float) -> float:
        return left + (power - first) / (last - first) * width

    def y(milliseconds: float) -> float:
        power = math.log10(milliseconds)
        return TOP + (HIGH - power) / (HIGH - LOW) * (HEIGHT - TOP - BOTTOM)

    parts = [label(left, TOP - 12, title, "start")]
    parts += [
        label(left - 8, y(10.0**power) + 4, f"{10.0**power:g}", "end")
        for power in range(int(LOW), int(HIGH) + 1)
    ]
    parts.append(label(left - 8, TOP - 12, "ms", "end"))
    for power in range(math.ceil(first), math.floor(last) + 1):
        text = f"{10**power:,}"
        parts.append(label(x(power), HEIGHT - BOTTOM + 20, text, "middle"))
        for start in (10.0**LOW, 10.0 ** (LOW + 1)):
            end = min(start * 10.0 ** (last - power), 10.0**HIGH)
            reach = power + math.log10(end / start)
            grid = [(x(power), y(start)), (x(reach), y(end))]
            parts.append(shape("polyline", grid, 'stroke="#ddd" fill="none"'))
    for name, points in lines.items():
        colour = COLOURS[name]
        drawn = [(x(a), y(b)) for a, b in points]
        style = f'stroke="{colour}" stroke-width="2.5" fill="none"'
        dash = f'stroke-dasharray="{DASHES[name]}"'
        parts.append(shape("polyline", drawn, f"{style} {dash}"))
        below = 34 if name == "buoy" else -12
        parts.append(label(drawn[-1][0], drawn[-1][1] + below, name, "end", colour))
    return parts


if __name__ == "__main__":
    main()
