"""The charts of a page: each a Bokeh figure over the steps, all zoomed together."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from buoy._core.verdicts import VERDICTS, Verdict
from buoy.report.run import Run
from buoy.report.theme import ALARM, DASHES, INK, RUNS, coat, figure_of, soft
from buoy.report.thin import thinned

__all__ = [
    "curves", "end_labels", "headroom_chart", "loss_charts", "powers", "scale_chart",
]  # fmt: skip

_RAISED = str.maketrans(
    "-0123456789",
    "\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079",
)
_LOG = 50.0  # times between the smallest and the largest: a logarithmic axis


def scale_chart(runs: Sequence[Run], x_range: Any) -> Any:
    """Draw the scale of every run, and a mark wherever a step was skipped."""
    chart = figure_of("scale", x_range=x_range)
    ends = []
    for index, run in enumerate(runs):
        logs = _logs(run.rows.scale)
        keep = thinned(logs)
        ends.append(limits(logs))
        steps = [run.rows.step[i] for i in keep]
        line = curve(chart, index, steps, logs[keep], stepped=True)
        # Bokeh finds no point on steps: an unseen line takes their place.
        unseen = chart.line("x", "y", source=line.data_source, line_alpha=0.0)
        _hover(chart, unseen, [("run", run.label), ("scale", "2^@y{0.##}")], runs)
    for index, run in enumerate(runs):
        _skips(chart, index, run, alone=len(runs) == 1)
    _ends(chart, runs, ends)
    _powers(chart, ends)
    _legend(chart)
    return chart


def _skips(chart: Any, index: int, run: Run, *, alone: bool) -> None:
    """Mark every skipped step: a shape for each verdict, none left out."""
    import numpy as np  # noqa: PLC0415 - comes with Bokeh

    missed: dict[Verdict, list[tuple[int, float]]] = {}
    for place in run.rows.skipped:
        row = run.rows[place]
        missed.setdefault(row.verdict, []).append((row.step, _log2(row.scale) or 0.0))
    for verdict, places in missed.items():
        steps, logs = zip(*places, strict=True)
        marks = chart.scatter(
            "x",
            "y",
            source={
                "x": steps_array(steps),
                "y": np.array(logs, dtype=np.float32),
            },
            marker=VERDICTS[verdict].marker,
            size=9,
            name=f"skips {index} {verdict}",
            fill_alpha=0.35,
            **({"legend_label": f"skipped: {verdict}"} if alone else {}),
        )
        colour = ALARM if alone else RUNS[index % len(RUNS)]
        coat(marks.glyph, line_color=colour, fill_color=colour)
        said = [("run", run.label), ("skipped", verdict.value), ("scale", "2^@y{0.##}")]
        _hover(chart, marks, said, [run, run])


def headroom_chart(runs: Sequence[Run], x_range: Any) -> Any:
    """Draw how many bits the largest gradient stayed below the limit."""
    import numpy as np  # noqa: PLC0415
    from bokeh.models import Span  # noqa: PLC0415

    chart = figure_of("headroom", 200, x_range=x_range)
    chart.yaxis.axis_label = "bits"
    ends = []
    for index, run in enumerate(runs):
        rows = run.rows
        applied = np.frombuffer(rows.applied, dtype=bool)
        bits = np.where(applied, np.asarray(rows.headroom), math.nan)
        keep = thinned(bits)
        ends.append(limits(bits))
        steps = [rows.step[i] for i in keep]
        line = curve(chart, index, steps, bits[keep])
        _hover(chart, line, [("run", run.label), ("headroom", "@y{0.0} bits")], runs)
    _ends(chart, runs, ends)
    limit = Span(location=0, dimension="width", line_dash="dashed", line_width=1.5)
    chart.add_layout(coat(limit, line_color=ALARM))
    return chart


def loss_charts(runs: Sequence[Run], x_range: Any) -> dict[str, Any]:
    """Draw loss, norm and every further series, one chart each, all runs in it."""
    import numpy as np  # noqa: PLC0415

    made = {}
    known: dict[str, list[tuple[int, Sequence[int], Any]]] = {}
    for index, run in enumerate(runs):
        steps = run.rows.step
        for name in ("loss", "norm"):
            if name in run.series:
                continue
            values = _finite(np.asarray(getattr(run.rows, name)))
            if not np.isnan(values).all():
                known.setdefault(name, []).append((index, steps, values))
        for name in run.series:
            at, numbers = run.curve(name)
            some = _finite(np.asarray(numbers, dtype=np.float64))
            known.setdefault(name, []).append((index, at, some))
    for name, lines in known.items():
        made[name] = curves(name, runs, lines, x_range)
    return made


def curves(
    name: str,
    runs: Sequence[Run],
    lines: Sequence[tuple[int, Sequence[int], Any]],
    x_range: Any,
) -> Any:
    """Draw one quantity of several runs; a value of NaN is not drawn."""
    ends = [limits(values) for _, _, values in lines]
    low, high = min(low for low, _ in ends), max(high for _, high in ends)
    kind = "log" if low > 0.0 and high / low > _LOG else "linear"
    chart = figure_of(name, 220, x_range=x_range, y_axis_type=kind)
    if kind == "log":
        chart.yaxis.ticker = ticks = log_ticks(low, high)
        chart.yaxis.major_label_overrides = {tick: f"{tick:g}" for tick in ticks}
    for index, steps, values in lines:
        keep = thinned(values)
        line = curve(chart, index, [steps[i] for i in keep], values[keep])
        _hover(chart, line, [("run", runs[index].label), (name, "@y{0.[0000]}")], runs)
    end_labels(chart, runs, low=low, high=high, log=kind == "log")
    return chart


def log_ticks(low: float, high: float) -> list[float]:
    """Choose the labels of a logarithmic axis; Bokeh's own leave out small numbers.

    Example:
        >>> log_ticks(0.02, 1.0)
        [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0]
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    digits = (1, 2, 5) if last - first <= 3 else (1,)
    decades = range(first, last + 1, max(1, (last - first) // 6))
    return [float(f"{digit}e{k}") for k in decades for digit in digits]


def curve(
    chart: Any,
    index: int,
    steps: Sequence[int],
    values: Sequence[float | None] | Any,
    *,
    label: str | None = None,
    stepped: bool = False,
    dash: str | None = None,
) -> Any:
    """Add a line in a run's colour and dash."""
    import numpy as np  # noqa: PLC0415

    source = {
        "x": steps_array(steps),
        "y": np.asarray(values, dtype=np.float32),
    }
    options = {"legend_label": label} if label else {}
    draw = chart.step if stepped else chart.line
    line = draw(
        "x",
        "y",
        source=source,
        line_width=1.8,
        line_dash=dash or DASHES[index % len(DASHES)],
        name=f"{chart.name} {index}",
        **({"mode": "after"} if stepped else {}),
        **options,
    )
    coat(line.glyph, line_color=RUNS[index % len(RUNS)])
    return line


def end_labels(
    chart: Any, runs: Sequence[Run], *, low: float, high: float, log: bool = False
) -> None:
    """Write each run's name where its line ends; lines that end together share it.

    Colours and dashes do not help where one line covers another.
    """
    from bokeh.models import Label  # noqa: PLC0415

    if len(runs) < 2:
        return
    ends = []
    for index, run in enumerate(runs):
        for line in chart.renderers:
            x, y = (line.data_source.data.get(key, ()) for key in "xy")
            mine = line.name in {f"{chart.name} {index}", f"{chart.name} {index} 0"}
            if mine and len(x) and math.isfinite(y[-1]):
                ends.append((float(y[-1]), float(x[-1]), index, run.label))
                break
    place = math.log if log else float
    gap = 0.075 * (place(high) - place(low)) if high > low else 0.0
    groups: list[list[tuple[float, float, int, str]]] = []
    for end in sorted(ends):
        if groups and place(end[0]) - place(groups[-1][0][0]) <= gap:
            groups[-1].append(end)
        else:
            groups.append([end])
    for group in groups:
        y = group[len(group) // 2][0]
        height = (place(y) - place(low)) / (place(high) - place(low)) if gap else 0.5
        # Names below each other must not leave the chart, to no side.
        side = "bottom" if height < 0.25 else "top" if height > 0.75 else "middle"
        names = ",\n".join(f"{name:.18}" for _, _, _, name in group)
        label = Label(
            x=max(x for _, x, _, _ in group), y=y, x_offset=6, text=names,
            text_font_size="12px", text_baseline=side, name=f"end {chart.name}",
        )  # fmt: skip
        colour = RUNS[group[0][2] % len(RUNS)] if len(group) == 1 else INK
        chart.add_layout(coat(label, text_color=colour))


def steps_array(steps: Sequence[int]) -> Any:
    """Pack steps as browsers take them: as 32-bit integers if they fit, else floats."""
    import numpy as np  # noqa: PLC0415

    made = np.asarray(steps, dtype=np.float64)
    fits = made.size == 0 or bool(np.abs(made).max() < 2.0**31)
    return made.astype(np.int32) if fits else made


def _hover(
    chart: Any, renderer: Any, said: list[tuple[str, str]], runs: Sequence[Run]
) -> None:
    """Show values where the pointer is; the run's name only where there are several."""
    from bokeh.models import HoverTool  # noqa: PLC0415

    tips = [("step", "@x{0,0}"), *(said if len(runs) > 1 else said[1:])]
    # A label may hold anything; in a tooltip @ and $ would be looked up.
    tips = [
        (name, text.replace("$", "") if name != "run" else _plain(text))
        for name, text in tips
    ]
    chart.add_tools(
        HoverTool(
            renderers=[renderer],
            tooltips=tips,
            mode="vline",
            visible=False,
            line_policy="nearest",
        )
    )


def _plain(text: str) -> str:
    from html import escape  # noqa: PLC0415

    return escape(text.replace("@", "").replace("$", ""))


def powers(exponents: Iterable[int]) -> dict[int, str]:
    """Return the labels of whole exponents.

    No script of ours formats them: the page forbids to make code out of text.
    """
    return {k: f"2{str(k).translate(_RAISED)}" for k in exponents}


def _powers(chart: Any, ends: Sequence[tuple[float, float]]) -> None:
    from bokeh.models import BasicTicker  # noqa: PLC0415

    low, high = min(low for low, _ in ends), max(high for _, high in ends)
    beyond = 8 + (high - low) / 4  # the axis ends a little after the curves
    shown = range(math.floor(low - beyond), math.ceil(high + beyond) + 1)
    chart.yaxis.major_label_overrides = powers(shown)
    chart.yaxis.ticker = BasicTicker(min_interval=1.0, mantissas=[1, 2, 4, 5])


def _legend(chart: Any) -> None:
    if chart.legend:
        soft(chart.legend[0])
        chart.add_layout(chart.legend[0], "below")


def limits(values: Any) -> tuple[float, float]:
    """Return the smallest and the largest value that is not NaN; zeros if all are."""
    import numpy as np  # noqa: PLC0415

    known = values[~np.isnan(values)]
    return (float(known.min()), float(known.max())) if known.size else (0.0, 0.0)


def _ends(chart: Any, runs: Sequence[Run], ends: list[tuple[float, float]]) -> None:
    low = min((low for low, _ in ends), default=0.0)
    end_labels(chart, runs, low=low, high=max((high for _, high in ends), default=0.0))


def _logs(scales: Any) -> Any:
    """Return log2 of every scale; NaN where it has none."""
    import numpy as np  # noqa: PLC0415

    numbers = np.asarray(scales)
    usable = (numbers > 0.0) & (numbers < math.inf)
    return np.log2(numbers, out=np.full(len(numbers), math.nan), where=usable)


def _log2(value: float) -> float | None:
    return math.log2(value) if 0.0 < value < math.inf else None


def _finite(values: Any) -> Any:
    """Replace infinite values by NaN."""
    import numpy as np  # noqa: PLC0415

    return np.where(np.isfinite(values), values, math.nan)
