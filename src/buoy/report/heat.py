"""Where the gradients lie: binades over time, with the format's window drawn in."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from buoy._core.formats import Format
from buoy.report.facts import format_of
from buoy.report.figures import curve, end_labels, powers
from buoy.report.run import Run
from buoy.report.theme import ALARM, HEAT, INK, coat, figure_of, soft
from buoy.report.thin import thinned
from buoy.trace.counts import Shot
from buoy.trace.replayable import total

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from bokeh.models import LogColorMapper, Range1d
    from bokeh.plotting import figure

__all__ = ["binades", "columns", "has_map", "heat_map", "shares_chart"]

_MOST_COLUMNS = 240
# Binades: those that are always drawn, and those that are drawn at the most.
_USUALLY = (-27, 18)
_AT_MOST = (-42, 20)
# Percent of the gradients: the ends of the colours.
_FAINT = 0.01
_STRONG = 20.0
# The ground of a label and its ink, light and dark.
_GROUND = ("#ffffff", "#171d24")
_LABEL = ("#8c1d18", "#ffb4ab")


def columns(shots: Sequence[Shot]) -> list[tuple[float, float, Shot]]:
    """Cut the time into equal columns, each with the look that was valid in it.

    Example:
        >>> shots = [Shot(step, 1.0, {}) for step in (0, 100, 200)]
        >>> [(left, right, shot.step) for left, right, shot in columns(shots)]
        [(0.0, 100.0, 0), (100.0, 200.0, 100), (200.0, 300.0, 200)]
    """
    if not shots:
        return []
    first = shots[0].step
    last = shots[-1].step
    count = min(len(shots), _MOST_COLUMNS)
    width = (last - first) / (count - 1) if count > 1 else 1.0
    made: list[tuple[float, float, Shot]] = []
    at = 0
    for i in range(count):
        left = first + i * width
        middle = left + width / 2
        while at + 1 < len(shots) and shots[at + 1].step <= middle:
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
    low = min([*used, _USUALLY[0]])
    high = max([*used, _USUALLY[1]])
    return max(low, _AT_MOST[0]), min(high, _AT_MOST[1])


def has_map(run: Run) -> bool:
    """Return whether any look found a gradient that is not zero."""
    return any(total(shot.tensors.values()) for shot in run.recording.shots)


def heat_map(run: Run, span: tuple[int, int], x_range: "Range1d") -> "figure":
    """Draw the share of the scaled gradients in each binade over time."""
    from bokeh.models import HoverTool, LogColorMapper  # noqa: PLC0415

    parts = columns(run.recording.shots)
    low, high = span
    height = high - low + 1
    chart = figure_of("heat", 380, x_range=x_range, y_range=(low, high + 1))
    _axis(chart)
    mapper = LogColorMapper(
        palette=HEAT[0], low=_FAINT, high=_STRONG, nan_color="rgba(0,0,0,0)"
    )
    coat(mapper, palette=HEAT)
    left, _, _ = parts[0]
    _, right, _ = parts[-1]
    drawn = chart.image(
        image=[_image([shot for _, _, shot in parts], low, height)],
        x=left,
        y=low,
        dw=right - left,
        dh=height,
        color_mapper=mapper,
        name="heat",
    )
    tips = [("step", "$x{0,0}"), ("size", "2^$y{0}"), ("share", "@image{0.[000]} %")]
    chart.add_tools(HoverTool(renderers=[drawn], tooltips=tips, visible=False))
    _window(chart, format_of(run.recording), low, high + 1)
    _colour_bar(chart, mapper)
    return chart


def _image(shots: Sequence[Shot], low: int, height: int) -> "npt.NDArray[np.float32]":
    """Return the percent of the gradients in each binade, of every look; else NaN."""
    import numpy as np  # noqa: PLC0415 - comes with Bokeh

    image = np.full((height, len(shots)), np.nan, dtype=np.float32)
    for column, shot in enumerate(shots):
        tensors = shot.tensors.values()
        size = sum(seen.size or seen.looked_at for seen in tensors) or 1
        for binade, count in total(tensors).items():
            if low <= binade < low + height and count:
                image[binade - low, column] = 100.0 * count / size
    return image


def _colour_bar(chart: "figure", mapper: "LogColorMapper") -> None:
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


def _axis(chart: "figure") -> None:
    from bokeh.models import FixedTicker  # noqa: PLC0415

    ticks = list(range(-40, 21, 4))  # all that may be drawn: see `_AT_MOST`
    chart.yaxis.major_label_overrides = powers(ticks)
    chart.yaxis.ticker = FixedTicker(ticks=ticks)
    chart.ygrid.visible = False


def _window(chart: "figure", limits: Format, low: float, high: float) -> None:
    """Draw where the format ends, above and below, and say what that means."""
    from bokeh.models import BoxAnnotation, Label, Span  # noqa: PLC0415

    top = limits.max_log2
    normal = math.log2(limits.smallest_normal)
    zero = math.log2(limits.smallest_subnormal)
    for bottom, ceiling in ((low, zero), (top, high)):
        box = BoxAnnotation(bottom=bottom, top=ceiling, fill_alpha=0.13)
        chart.add_layout(coat(box, fill_color=ALARM))
    for place, dash, text, above in (
        (top, "solid", f"{limits.max:.0f}: overflow above", True),
        (normal, "dashed", "smallest normal: fewer digits below", False),
        (zero, "solid", "smallest number: zero below", False),
    ):
        line = Span(location=place, dimension="width", line_width=1.4, line_dash=dash)
        chart.add_layout(coat(line, line_color=ALARM))
        label = Label(
            x=8,
            y=place,
            x_units="screen",
            y_offset=3 if above else -3,
            text=text,
            text_font_size="12px",
            text_baseline="bottom" if above else "top",
            background_fill_alpha=0.8,
        )
        chart.add_layout(coat(label, text_color=_LABEL, background_fill_color=_GROUND))


def shares_chart(runs: Sequence[Run], x_range: "Range1d") -> "figure":
    """Draw which share of the gradients is zero or has lost digits, over time."""
    from bokeh.models import HoverTool  # noqa: PLC0415

    chart = figure_of("shares", 200, x_range=x_range)
    chart.yaxis.axis_label = "% of the gradients"
    tips = [("step", "@x{0,0}"), ("share", "@y{0.[000]} %")]
    top = 1.0  # percent: less would be drawn as if it were much
    for index, run in enumerate(runs):
        steps = [step for step, _ in run.points]
        lines = _share_lines(run, alone=len(runs) == 1)
        for number, (label, values) in enumerate(lines.items()):
            keep = thinned(values)
            line = curve(
                chart,
                index + number,
                [steps[i] for i in keep],
                [values[i] for i in keep],
                label=label,
            )
            line.name = f"shares {index} {number}"
            top = max(top, *values)
            chart.add_tools(
                HoverTool(renderers=[line], tooltips=tips, mode="vline", visible=False)
            )
    high = 1.05 * top
    chart.y_range.update(start=0.0, end=high)
    end_labels(chart, runs, low=0.0, high=high)
    if chart.legend:
        soft(chart.legend[0])
        chart.legend[0].orientation = "horizontal"
        chart.add_layout(chart.legend[0], "below")
    return chart


def _share_lines(run: Run, *, alone: bool) -> dict[str, list[float]]:
    """Return the lines of a run by their labels; of several runs one each, without."""
    found = [shares for _, shares in run.points]
    if not found:
        return {}
    if alone:
        return {
            "zero": [100.0 * shares.zero for shares in found],
            "subnormal": [100.0 * shares.subnormal for shares in found],
        }
    return {"": [100.0 * (shares.zero + shares.subnormal) for shares in found]}
