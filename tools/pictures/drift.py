"""Draw docs/_static/drift.svg and rivals.svg: scales of policies over one trace.

    python tools/pictures/drift.py

The shaded area is where a scale overflows; the closer below it, the fewer gradients
are lost to zero.
"""

from pathlib import Path

from svg import HEIGHT, WIDTH, label, shape, write

import buoy

FOLDER = Path(__file__).parents[2] / "docs/_static"
# Margins.
LEFT = 64
TOP = 44
BOTTOM = 46
# The ends of the axis: powers of two.
LOW = 0.0
HIGH = 48.0
COLOURS = {
    "torch": "#b35900",
    "megatron": "#7a3fb0",
    "fairseq": "#2a7d2a",
    "headroom": "#0b6bcb",
}
DASHES = {"torch": "6 3", "megatron": "2 3", "fairseq": "9 3 2 3", "headroom": ""}


def main() -> None:
    """Draw both pictures."""
    title = "Loss scale over 4000 steps while the gradients shrink by 2^20"
    places = {"torch": (3990, 13.0), "headroom": (3990, 23.5)}
    draw("drift", "drift_down", places, title, (700, 40))
    title = "Loss scale over 4000 steps while the gradients jump between ten levels"
    lines = dict(zip(COLOURS, (46.0, 43.0, 40.0, 37.0), strict=True))
    draw("rivals", "jumps", {n: (3990, y) for n, y in lines.items()}, title, (250, 40))


def draw(
    name: str,
    kind: str,
    places: dict[str, tuple[float, float]],
    title: str,
    overflow: tuple[float, float],
) -> None:
    """Replay the policies of `places`, where their labels go, and write the picture."""
    steps = 4000
    trace = buoy.trace.synthetic(kind, steps=steps, seed=0)

    def x(step: float) -> float:
        return LEFT + step / steps * (WIDTH - LEFT - 20)

    def y(binades: float) -> float:
        return TOP + (HIGH - binades) / (HIGH - LOW) * (HEIGHT - TOP - BOTTOM)

    every = range(0, steps, 20)
    limit = [(x(s), y(min(HIGH, trace.max_log2 - trace.amax_log2[s]))) for s in every]
    area = [(x(0), y(HIGH)), *limit, (x(steps), limit[-1][1]), (x(steps), y(HIGH))]
    parts = [shape("polygon", area, 'fill="#d33" fill-opacity="0.13" stroke="none"')]
    for power in range(0, 49, 8):
        parts.append(label(LEFT - 8, y(power) + 4, f"2^{power}", "end"))
        grid = [(LEFT, y(power)), (x(steps), y(power))]
        parts.append(shape("polyline", grid, 'stroke="#ddd" fill="none"'))
    parts += [
        label(x(step), HEIGHT - BOTTOM + 18, str(step), "middle")
        for step in range(0, steps + 1, 1000)
    ]
    for result in buoy.replay(trace, list(places)):
        lost = 100 * (result.weight_underflow or 0.0)
        points = []
        for start, end, height in result.scales():
            points += [(x(start), y(height)), (x(end), y(height))]
        colour = COLOURS[result.name]
        style = f'stroke="{colour}" stroke-width="2.2" fill="none"'
        dash = f'stroke-dasharray="{DASHES[result.name]}"'
        parts.append(shape("polyline", points, f"{style} {dash}"))
        text = f"{result.name}: {result.skipped} skipped, {lost:.2g} % lost to zero"
        step, height = places[result.name]
        parts.append(label(x(step), y(height), text, "end", colour))
        print(f"{name}: {text}")
    parts.append(label(x(overflow[0]), y(overflow[1]), "overflow", "middle", "#c22"))
    parts.append(label(LEFT, 22, title, "start"))
    write(FOLDER / f"{name}.svg", parts)


if __name__ == "__main__":
    main()
