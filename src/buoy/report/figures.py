"""The charts of a page: each a Bokeh figure over the steps, all zoomed together."""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from buoy._core.verdicts import VERDICTS, Verdict
from buoy.report.run import Run
from buoy.report.theme import ALARM, DASHES, INK, RUNS, coat, figure_of, soft
from buoy.report.thin import thinned

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from bokeh.models import GlyphRenderer, Range1d
    from bokeh.plotting import figure

    from buoy._core.step import Row

__all__ = [
    "Line", "curve", "curves", "end_labels", "headroom_chart", "loss_charts", "powers",
    "scale_chart",
]  # fmt: skip

_RAISED = str.maketrans(
    "-0123456789",
    "\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079",
)
_LOG = 50.0  # times between the smallest and the largest: a logarithmic axis
_BESIDE = 0.075  # of the height: lines that end this close share their label


class Line(NamedTuple):
    """One quantity of one run."""

    run: int  # the place of the run among those of the page
    steps: Sequence[int]
    values: "npt.NDArray[Any]"  # NaN where there is none


def scale_chart(runs: Sequence[Run], x_range: "Range1d") -> "figure":
    """Draw the scale of every run, and a mark wherever a step was skipped."""
    chart = figure_of("scale", x_range=x_range)
    spans = []
    for index, run in enumerate(runs):
        logs = _logs(run.rows.scale)
        keep = thinned(logs)
        spans.append(_span_of(logs))
        steps = [run.rows.step[i] for i in keep]
        line = curve(chart, index, steps, logs[keep], stepped=True)
        # Bokeh finds no point on steps: an unseen line takes their place.
        unseen = chart.line("x", "y", source=line.data_source, line_alpha=0.0)
        _hover(chart, unseen, [("run", run.label), ("scale", "2^@y{0.##}")], runs)
    for index, run in enumerate(runs):
        _skips(chart, index, run, alone=len(runs) == 1)
    low, high = _joined(spans)
    end_labels(chart, runs, low=low, high=high)
    _powers(chart, low, high)
    _legend(chart)
    return chart


def _skips(chart: "figure", index: int, run: Run, *, alone: bool) -> None:
    """Mark every skipped step: a shape for each verdict, none left out."""
    import numpy as np  # noqa: PLC0415 - comes with Bokeh

    missed: dict[Verdict, list[Row]] = {}
    for place in run.rows.skipped:
        row = run.rows[place]
        missed.setdefault(row.verdict, []).append(row)
    colour = ALARM if alone else RUNS[index % len(RUNS)]
    for verdict, rows in missed.items():
        logs = [_log2(row.scale) for row in rows]
        legend = {"legend_label": f"skipped: {verdict}"} if alone else {}
        marks = chart.scatter(
            "x",
            "y",
            source={
                "x": steps_array([row.step for row in rows]),
                "y": np.array(logs, dtype=np.float32),
            },
            marker=VERDICTS[verdict].marker,
            size=9,
            name=f"skips {index} {verdict}",
            fill_alpha=0.35,
            **legend,
        )
        coat(marks.glyph, line_color=colour, fill_color=colour)
        tips = [("run", run.label), ("skipped", verdict.value), ("scale", "2^@y{0.##}")]
        _hover(chart, marks, tips, [run, run])


def headroom_chart(runs: Sequence[Run], x_range: "Range1d") -> "figure":
    """Draw how many bits the largest gradient stayed below the limit."""
    import numpy as np  # noqa: PLC0415
    from bokeh.models import Span  # noqa: PLC0415

    chart = figure_of("headroom", 200, x_range=x_range)
    chart.yaxis.axis_label = "bits"
    spans = []
    for index, run in enumerate(runs):
        rows = run.rows
        applied = np.frombuffer(rows.applied, dtype=bool)
        bits = np.where(applied, np.asarray(rows.headroom), math.nan)
        keep = thinned(bits)
        spans.append(_span_of(bits))
        steps = [rows.step[i] for i in keep]
        line = curve(chart, index, steps, bits[keep])
        _hover(chart, line, [("run", run.label), ("headroom", "@y{0.0} bits")], runs)
    low, high = _joined(spans)
    end_labels(chart, runs, low=low, high=high)
    limit = Span(location=0, dimension="width", line_dash="dashed", line_width=1.5)
    chart.add_layout(coat(limit, line_color=ALARM))
    return chart


def loss_charts(runs: Sequence[Run], x_range: "Range1d") -> "dict[str, figure]":
    """Draw loss, norm and every further series, one chart each, all runs in it."""
    import numpy as np  # noqa: PLC0415

    lines: dict[str, list[Line]] = {}
    for index, run in enumerate(runs):
        for name in ("loss", "norm"):
            if name in run.series:
                continue
            recorded = _finite(np.asarray(getattr(run.rows, name)))
            if not np.isnan(recorded).all():
                line = Line(index, run.rows.step, recorded)
                lines.setdefault(name, []).append(line)
        for name in run.series:
            steps, numbers = run.curve(name)
            values = _finite(np.asarray(numbers, dtype=np.float64))
            lines.setdefault(name, []).append(Line(index, steps, values))
    return {name: curves(name, runs, some, x_range) for name, some in lines.items()}


def curves(
    name: str, runs: Sequence[Run], lines: Sequence[Line], x_range: "Range1d"
) -> "figure":
    """Draw one quantity of several runs; a value of NaN is not drawn."""
    low, high = _joined([_span_of(line.values) for line in lines])
    log = low > 0.0 and high / low > _LOG
    kind = "log" if log else "linear"
    chart = figure_of(name, 220, x_range=x_range, y_axis_type=kind)
    if log:
        ticks = log_ticks(low, high)
        chart.yaxis.ticker = ticks
        chart.yaxis.major_label_overrides = {tick: f"{tick:g}" for tick in ticks}
    for index, steps, values in lines:
        keep = thinned(values)
        drawn = curve(chart, index, [steps[i] for i in keep], values[keep])
        _hover(chart, drawn, [("run", runs[index].label), (name, "@y{0.[0000]}")], runs)
    end_labels(chart, runs, low=low, high=high, log=log)
    return chart


def log_ticks(low: float, high: float) -> list[float]:
    """Choose the labels of a logarithmic axis; Bokeh's own leave out small numbers.

    Example:
        >>> log_ticks(0.02, 1.0)
        [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0]
    """
    first = math.floor(math.log10(low))
    last = math.ceil(math.log10(high))
    digits = (1, 2, 5) if last - first <= 3 else (1,)
    decades = range(first, last + 1, max(1, (last - first) // 6))
    return [float(f"{digit}e{k}") for k in decades for digit in digits]


def curve(
    chart: "figure",
    index: int,
    steps: Sequence[int],
    values: "Sequence[float] | npt.NDArray[Any]",
    *,
    label: str = "",
    stepped: bool = False,
    dash: str | None = None,
) -> "GlyphRenderer":
    """Add a line in a run's colour and dash."""
    import numpy as np  # noqa: PLC0415

    options: dict[str, Any] = {
        "source": {
            "x": steps_array(steps),
            "y": np.asarray(values, dtype=np.float32),
        },
        "line_width": 1.8,
        "line_dash": dash or DASHES[index % len(DASHES)],
        "name": f"{chart.name} {index}",
    }
    if label:
        options["legend_label"] = label
    if stepped:
        line = chart.step("x", "y", mode="after", **options)
    else:
        line = chart.line("x", "y", **options)
    coat(line.glyph, line_color=RUNS[index % len(RUNS)])
    return line


class _End(NamedTuple):
    """Where a run's line ends."""

    y: float
    x: float
    run: int
    label: str


def end_labels(
    chart: "figure", runs: Sequence[Run], *, low: float, high: float, log: bool = False
) -> None:
    """Write each run's name where its line ends; lines that end together share it.

    Colours and dashes do not help where one line covers another.
    """
    from bokeh.models import Label  # noqa: PLC0415

    if len(runs) < 2:
        return

    def height(y: float) -> float:
        """Return where a value lies between the lowest, 0, and the highest, 1."""
        if not high > low:
            return 0.5
        place = math.log if log else float
        return (place(y) - place(low)) / (place(high) - place(low))

    groups: list[list[_End]] = []
    for end in sorted(_ends(chart, runs)):
        if groups and height(end.y) - height(groups[-1][0].y) <= _BESIDE:
            groups[-1].append(end)
        else:
            groups.append([end])
    for group in groups:
        middle = group[len(group) // 2]
        label = Label(
            x=max(end.x for end in group),
            y=middle.y,
            x_offset=6,
            text=",\n".join(f"{end.label:.18}" for end in group),
            text_font_size="12px",
            text_baseline=_side(height(middle.y)),
            name=f"end {chart.name}",
        )
        colour = RUNS[middle.run % len(RUNS)] if len(group) == 1 else INK
        chart.add_layout(coat(label, text_color=colour))


def _ends(chart: "figure", runs: Sequence[Run]) -> list[_End]:
    """Find the last point of each run's line; of several lines, of the first."""
    found = []
    for index, run in enumerate(runs):
        names = {f"{chart.name} {index}", f"{chart.name} {index} 0"}
        for line in chart.renderers:
            if line.name not in names:
                continue
            x = line.data_source.data["x"]
            y = line.data_source.data["y"]
            if len(x) and math.isfinite(y[-1]):
                found.append(_End(float(y[-1]), float(x[-1]), index, run.label))
                break
    return found


def _side(height: float) -> str:
    """Choose the side of a label that is at the line: it must not leave the chart."""
    if height < 0.25:
        return "bottom"
    if height > 0.75:
        return "top"
    return "middle"


def steps_array(steps: Sequence[int]) -> "npt.NDArray[np.int32 | np.float64]":
    """Pack steps as browsers take them: as 32-bit integers if they fit, else floats."""
    import numpy as np  # noqa: PLC0415

    made = np.asarray(steps, dtype=np.float64)
    fits = made.size == 0 or bool(np.abs(made).max() < 2.0**31)
    return made.astype(np.int32) if fits else made


def _hover(
    chart: "figure",
    renderer: "GlyphRenderer",
    tips: list[tuple[str, str]],
    runs: Sequence[Run],
) -> None:
    """Show values where the pointer is; the run's name only where there are several."""
    from bokeh.models import HoverTool  # noqa: PLC0415

    several = len(runs) > 1
    tooltips = [("step", "@x{0,0}")]
    for name, text in tips:
        if name != "run":
            tooltips.append((name, text.replace("$", "")))
        elif several:
            tooltips.append((name, _plain(text)))
    chart.add_tools(
        HoverTool(
            renderers=[renderer],
            tooltips=tooltips,
            mode="vline",
            visible=False,
            line_policy="nearest",
        )
    )


def _plain(text: str) -> str:
    """Make a label plain text: in a tooltip, @ and $ would be looked up."""
    from html import escape  # noqa: PLC0415

    return escape(text.replace("@", "").replace("$", ""))


def powers(exponents: Iterable[int]) -> dict[int, str]:
    """Return the labels of whole exponents.

    No script of ours formats them: the page forbids to make code out of text.
    """
    return {k: f"2{str(k).translate(_RAISED)}" for k in exponents}


def _powers(chart: "figure", low: float, high: float) -> None:
    """Label an axis of exponents as powers of two."""
    from bokeh.models import BasicTicker  # noqa: PLC0415

    beyond = 8 + (high - low) / 4  # the axis ends a little after the curves
    shown = range(math.floor(low - beyond), math.ceil(high + beyond) + 1)
    chart.yaxis.major_label_overrides = powers(shown)
    chart.yaxis.ticker = BasicTicker(min_interval=1.0, mantissas=[1, 2, 4, 5])


def _legend(chart: "figure") -> None:
    if chart.legend:
        soft(chart.legend[0])
        chart.add_layout(chart.legend[0], "below")


def _span_of(values: "npt.NDArray[Any]") -> tuple[float, float]:
    """Return the smallest and the largest value that is not NaN; zeros if all are."""
    import numpy as np  # noqa: PLC0415

    known = values[~np.isnan(values)]
    if not known.size:
        return 0.0, 0.0
    return float(known.min()), float(known.max())


def _joined(spans: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the span that holds all of them."""
    return min(low for low, _ in spans), max(high for _, high in spans)


def _logs(scales: Sequence[float]) -> "npt.NDArray[np.float64]":
    """Return log2 of every scale; NaN where it has none."""
    import numpy as np  # noqa: PLC0415

    numbers = np.asarray(scales)
    usable = (numbers > 0.0) & (numbers < math.inf)
    logs: npt.NDArray[np.float64] = np.full(len(numbers), math.nan)
    np.log2(numbers, out=logs, where=usable)
    return logs


def _log2(scale: float) -> float:
    """Return where to draw a scale; 0 if it has no logarithm."""
    return math.log2(scale) if 0.0 < scale < math.inf else 0.0


def _finite(values: "npt.NDArray[np.float64]") -> "npt.NDArray[np.float64]":
    """Replace infinite values by NaN."""
    import numpy as np  # noqa: PLC0415

    return np.where(np.isfinite(values), values, math.nan)
