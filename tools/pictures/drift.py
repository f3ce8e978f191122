"""Draw docs/_static/drift.svg: the scale of two policies while the gradients shrink.

    python tools/pictures/drift.py

The shaded area is where a scale overflows; the closer below it, the fewer gradients
are lost to zero.
"""

from pathlib import Path

from svg import HEIGHT, WIDTH, label, shape, write

import buoy

LEFT, TOP, BOTTOM = 64, 44, 46
LOW, HIGH = 0.0, 48.0
COLOURS = {"torch": "#b35900", "headroom": "#0b6bcb"}


def main() -> None:
    """Replay both policies and write the picture."""
    steps = 4000
    trace = buoy.trace.synthetic("drift_down", steps=steps, seed=0)
    results = buoy.replay(trace, list(COLOURS))

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
    for result, dash in zip(results, ("6 3", ""), strict=True):
        lost = 100 * (result.weight_underflow or 0.0)
        runs = [edge for run in result.scales() for edge in (run[:1], run[1:2])]
        heights = [run[2] for run in result.scales() for _ in range(2)]
        points = [(x(*run), y(h)) for run, h in zip(runs, heights, strict=True)]
        colour = COLOURS[result.name]
        style = f'stroke="{colour}" stroke-width="2.5" fill="none"'
        parts.append(shape("polyline", points, f'{style} stroke-dasharray="{dash}"'))
        text = f"{result.name}: {result.skipped} skipped, {lost:.2g} % lost to zero"
        below = points[-1][1] + (22 if result.name == "torch" else 70)
        parts.append(label(x(steps) - 6, below, text, "end", colour))
    parts.append(label(x(700), y(40), "overflow", "middle", "#c22"))
    title = "Loss scale over 4000 steps while the gradients shrink by 2^20"
    parts.append(label(LEFT, 22, title, "start"))
    write(Path(__file__).parents[2] / "docs/_static/drift.svg", parts)


if __name__ == "__main__":
    main()
