"""Where the gradients lie: binades over time, with the format's window drawn in."""

import math
from collections.abc import Sequence
from typing import Any

from buoy._core.formats import FORMATS, Format
from buoy.report.figures import curve, end_labels, powers
from buoy.report.run import Run
from buoy.report.theme import ALARM, HEAT, INK, coat, figure_of, soft
from buoy.report.thin import thinned
from buoy.trace.recording import Recording, Shot
from buoy.trace.replayable import total

__all__ = ["binades", "columns", "has_map", "heat_map", "shares_chart"]

_MOST_COLUMNS = 240
_LEAST, _LARGEST = -42, 20  # binades that are drawn at the most
_FAINT, _STRONG = 0.01, 20.0  # percent of the gradients: the ends of the colours


def limits_of(recording: Recording) -> Format:
    """Find the run's number format."""
    return FORMATS.get(str(recording.meta.get("format")), FORMATS["fp16"])


def columns(shots: Sequence[Shot]) -> list[tuple[float, float, Shot]]:
    """Cut the time into equal columns, each with the look that was valid in it.

    Example:
        >>> shots = [Shot(step, 1.0, {}) for step in (0, 100, 200)]
        >>> [(left, right, shot.step) for left, right, shot in columns(shots)]
        [(0.0, 100.0, 0), (100.0, 200.0, 100), (200.0, 300.0, 200)]
    """
    if not shots:
        return []
    first, last = shots[0].step, shots[-1].step
    count = min(len(shots), _MOST_COLUMNS)
    width = (last - first) / (count - 1) if count > 1 else 1.0
    made, at = [], 0
    for i in range(count):
        left = first + i * width
        while at + 1 < len(shots) and shots[at + 1].step <= left + width / 2:
            at += 1
        made.append((left, left + width, shots[at]))
    return made


def binades(runs: Sequence[Run]) -> tuple[int, int]:
    """Find which binades to draw, the same for all runs: the format's and theirs."""
    used = [
        binade
        for run in runs
        for _, _, shot in columns(run.recording.shots)
        for binade in total(shot.tensors.values())
    ]
    return max(min([*used, -27]), _LEAST), min(max([*used, 18]), _LARGEST)


def has_map(run: Run) -> bool:
    """Return whether any look found a gradient that is not zero."""
    return any(total(shot.tensors.values()) for shot in run.recording.shots)


def heat_map(run: Run, span: tuple[int, int], x_range: Any) -> Any:
    """Draw the share of the scaled gradients in each binade over time."""
    import numpy as np  # noqa: PLC0415 - comes with Bokeh
    from bokeh.models import HoverTool, LogColorMapper  # noqa: PLC0415

    parts = columns(run.recording.shots)
    seen = [total(shot.tensors.values()) for _, _, shot in parts]
    low, high = span
    image = np.full((high - low + 1, len(parts)), np.nan, dtype=np.float32)
    for column, ((_, _, shot), counts) in enumerate(zip(parts, seen, strict=True)):
        size = sum(x.size or x.looked_at for x in shot.tensors.values()) or 1
        for binade, count in counts.items():
            if low <= binade <= high and count:
                image[binade - low, column] = 100.0 * count / size
    chart = figure_of("heat", 380, x_range=x_range, y_range=(low, high + 1))
    _axis(chart)
    mapper = LogColorMapper(
        palette=HEAT[0], low=_FAINT, high=_STRONG, nan_color="rgba(0,0,0,0)"
    )
    coat(mapper, palette=HEAT)
    left, right = parts[0][0], parts[-1][1]
    drawn = chart.image(
        image=[image], x=left, y=low, dw=right - left, dh=high - low + 1,
        color_mapper=mapper, name="heat",
    )  # fmt: skip
    tips = [("step", "$x{0,0}"), ("size", "2^$y{0}"), ("share", "@image{0.[000]} %")]
    chart.add_tools(HoverTool(renderers=[drawn], tooltips=tips, visible=False))
    _window(chart, limits_of(run.recording), low, high + 1)
    _colour_bar(chart, mapper)
    return chart


def _colour_bar(chart: Any, mapper: Any) -> None:
    from bokeh.models import ColorBar, FixedTicker, NumeralTickFormatter  # noqa: PLC0415

    bar = ColorBar(
        color_mapper=mapper,
        orientation="horizontal",
        height=8,
        width=220,
        padding=4,
        ticker=FixedTicker(ticks=[0.01, 0.1, 1, 10]),
        formatter=NumeralTickFormatter(format="0.[00]"),
        title="% of the gradients",
        title_text_font_size="12px",
        title_text_font_style="normal",
        background_fill_alpha=0.0,
        location="left",
    )
    coat(bar, major_label_text_color=INK, title_text_color=INK)
    chart.add_layout(bar, "below")


def _axis(chart: Any) -> None:
    from bokeh.models import FixedTicker  # noqa: PLC0415

    ticks = list(range(-40, 21, 4))
    chart.yaxis.major_label_overrides = powers(ticks)
    chart.yaxis.ticker = FixedTicker(ticks=ticks)
    chart.ygrid.visible = False


def _window(chart: Any, limits: Format, low: float, high: float) -> None:
    """Draw where the format ends, above and below, and say what that means."""
    from bokeh.models import BoxAnnotation, Label, Span  # noqa: PLC0415

    top = limits.max_log2
    normal = math.log2(limits.smallest_normal)
    zero = math.log2(limits.smallest_subnormal)
    for bottom, ceiling, alpha in ((low, zero, 0.13), (top, high, 0.13)):
        box = BoxAnnotation(bottom=bottom, top=ceiling, fill_alpha=alpha)
        chart.add_layout(coat(box, fill_color=ALARM))
    for place, dash, text, above in (
        (top, "solid", f"{limits.max:.0f}: overflow above", True),
        (normal, "dashed", "smallest normal: fewer digits below", False),
        (zero, "solid", "smallest number: zero below", False),
    ):
        line = Span(location=place, dimension="width", line_width=1.4, line_dash=dash)
        chart.add_layout(coat(line, line_color=ALARM))
        label = Label(
            x=8, y=place, x_units="screen", text=text, text_font_size="12px",
            y_offset=3 if above else -3, text_baseline="bottom" if above else "top",
        )  # fmt: skip
        label.background_fill_alpha = 0.8
        ground = ("#ffffff", "#171d24")
        ink = ("#8c1d18", "#ffb4ab")
        chart.add_layout(coat(label, text_color=ink, background_fill_color=ground))


def shares_chart(runs: Sequence[Run], x_range: Any) -> Any:
    """Draw which share of the gradients is zero or has lost digits, over time."""
    from bokeh.models import HoverTool  # noqa: PLC0415

    chart = figure_of("shares", 200, x_range=x_range)
    chart.yaxis.axis_label = "% of the gradients"
    top = 1.0  # percent: less would be drawn as if it were much
    for index, run in enumerate(runs):
        parts = run.points
        if not parts:
            continue
        steps = [step for step, _ in parts]
        alone = len(runs) == 1
        lines: dict[str | None, list[float]]
        if alone:
            lines = {
                "zero": [100.0 * found.zero for _, found in parts],
                "subnormal": [100.0 * found.subnormal for _, found in parts],
            }
        else:
            lines = {None: [100.0 * (f.zero + f.subnormal) for _, f in parts]}
        for number, (label, values) in enumerate(lines.items()):
            keep = thinned(values)
            line = curve(
                chart,
                index + number,
                [steps[i] for i in keep],
                [values[i] for i in keep],
                label=label,
            )
            top = max(top, *values)
            line.name = f"shares {index} {number}"
            tips = [("step", "@x{0,0}"), ("share", "@y{0.[000]} %")]
            chart.add_tools(
                HoverTool(renderers=[line], tooltips=tips, mode="vline", visible=False)
            )
    chart.y_range.update(start=0.0, end=1.05 * top)
    end_labels(chart, runs, low=0.0, high=1.05 * top)
    if chart.legend:
        soft(chart.legend[0])
        chart.legend[0].orientation = "horizontal"
        chart.add_layout(chart.legend[0], "below")
    return chart
