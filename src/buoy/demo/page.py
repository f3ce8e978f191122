"""The demo's page: the table at a glance, then each training in charts.

Made of the pieces of `buoy.report`; curves and maps are of the first seed.
"""

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from buoy.demo.results import Results
from buoy.demo.train import Outcome
from buoy.demo.workloads import Workload
from buoy.report.markup import Cell, figure_box, section, table
from buoy.report.parts import key
from buoy.report.run import Run
from buoy.report.sheet import save, sheet, slot
from buoy.trace.recording import Recording

if TYPE_CHECKING:
    from bokeh.models import Range1d
    from bokeh.plotting import figure

__all__ = ["write"]

_FIRST = ("buoy", "none", "torch")  # these have the clearest colours
_MAPS = ("none", "torch", "buoy")
_BLOCK = 8  # steps of which the curves show the mean
_PRECISIONS = {
    "fp16": "FP16 here means torch.float16 tensors, forward and backward",
    "emulated": (
        "FP16 is emulated here by buoy.emulate, since torch.float16 is slow on a CPU "
        "at this width"
    ),
}


def write(results: Results, out: str | os.PathLike[str], *, whole: bool = True) -> Path:
    """Write the page; `whole` says whether everything was trained to its end."""
    charts: dict[str, figure] = {}
    parts = [_glance(results, whole=whole)]
    for workload in results.workloads:
        runs = _runs(results, workload)
        if runs:
            parts.append(_training(workload, runs, charts))
    title = "What loss scaling does"
    if not whole:
        title += " (stopped early)"
    return save(sheet(title, _intro(results), "\n".join(parts), charts), out)


def _intro(results: Results) -> str:
    seeds = len({outcome.seed for outcome in results.outcomes})
    count = "one seed" if seeds == 1 else f"{seeds} seeds"
    return (
        "Small real trainings, each in FP32 and in FP16 with different loss scales, "
        f"on {count}. All else is the same: data, network, optimizer, FP32 master "
        "weights. Run it again, and every figure comes out the same."
    )


def _glance(results: Results, *, whole: bool) -> str:
    """Return the table of all results, and what they say."""
    rows = [
        [
            Cell(_name(workload), workload.name, markup=True),
            *(_cell(results, workload, column.name) for column in results.columns),
        ]
        for workload in results.workloads
    ]
    names = ["training", *(column.name for column in results.columns)]
    made = table("results", names, rows, caption="Results")

    said = "".join(
        f"<li>{escape(claim.text)}</li>" for claim in results.claims(titles=True)
    )
    early = "" if whole else "<p><b>Stopped early. Results so far:</b></p>"
    note = (
        '<p class="note">A cross marks what is more than 2 % worse than FP32. Figures '
        "are means over the seeds, of the FP32 weights after training; skipped steps "
        "are summed up over them.</p>"
    )
    ways = "".join(
        f"<dt>{escape(column.name)}</dt><dd>{escape(column.words)}</dd>"
        for column in results.columns
    )
    return section(
        "What you see",
        early,
        f"<ul>{said}</ul>",
        made,
        note,
        f"<dl>{ways}</dl>",
        name="glance",
    )


def _name(workload: Workload) -> str:
    better = "high is good" if workload.higher else "low is good"
    note = f"{workload.name}: {workload.metric}, {better}"
    return (
        f'<a href="#{workload.name}">{escape(workload.title)}</a><br>'
        f'<span class="note">{escape(note)}</span>'
    )


def _cell(results: Results, workload: Workload, column: str) -> Cell:
    cell = results.cell(workload, column)
    if cell is None:
        return Cell("-")
    text = score_text(workload, cell.score)
    good = results.as_good(workload, column)
    if column != "fp32" and good is not None:
        sign, kind = ("&#10003;", "healthy") if good else ("&#10007;", "trouble")
        text = f'<span class="chip {kind}">{sign} {text}</span>'
    if cell.skipped:
        text += f'<br><span class="note">{cell.skipped:,} skipped</span>'
    if not cell.finished:
        text += '<br><span class="note">unfinished</span>'
    return Cell(text, cell.score, markup=True)


def score_text(workload: Workload, score: float) -> str:
    """Write a score with the digits that matter.

    Example:
        >>> from buoy.demo.workloads import WORKLOADS
        >>> score_text(WORKLOADS["bandit"], 0.98633)
        '0.986'
        >>> score_text(WORKLOADS["bce"], 0.0021413)
        '0.00214'
    """
    return f"{score:.3g}" if workload.metric == "loss" else f"{score:.3f}"


def _runs(results: Results, workload: Workload) -> list[Run]:
    """Return the first seed's runs, those to look at first in front."""
    kept: dict[str, Outcome] = {}
    for outcome in sorted(results.outcomes, key=lambda outcome: outcome.seed):
        if outcome.workload == workload.name and outcome.rows:
            kept.setdefault(outcome.column, outcome)
    order = [*_FIRST, *(c.name for c in results.columns if c.name != "fp32"), "fp32"]
    names = [name for name in dict.fromkeys(order) if name in kept]
    return [_run(kept[name]) for name in names]


def _run(outcome: Outcome) -> Run:
    blocks = [
        outcome.rows[start : start + _BLOCK]
        for start in range(0, len(outcome.rows), _BLOCK)
    ]
    means = {block[0].step: fmean(row.loss or 0.0 for row in block) for block in blocks}
    recording = Recording(
        f"{outcome.workload} {outcome.column}",
        {"format": "fp16", "ended": True},
        outcome.rows,
        outcome.shots,
    )
    return Run(recording, outcome.column, series={"loss": means})


def _training(
    workload: Workload, runs: Sequence[Run], charts: "dict[str, figure]"
) -> str:
    """Draw one training: loss, scale and skips, what is lost, and in which layers."""
    from bokeh.models import Range1d  # noqa: PLC0415 - a large import

    from buoy.report.figures import loss_charts  # noqa: PLC0415

    last = max(row.step for run in runs for row in run.recording.rows) + 1
    x_range = Range1d(start=-0.01 * last, end=1.17 * last, bounds="auto")
    place = f"{workload.name} loss"
    charts[place] = loss_charts(runs, x_range)["loss"]
    words = f"{workload.words} {_PRECISIONS[workload.precision]}; seed 0 is drawn."
    narrow = [run for run in runs if run.label != "fp32"]
    return section(
        workload.title,
        f"<p>{escape(words)}</p>",
        key(runs),
        figure_box(slot(place), "Loss", f"unscaled, mean over {_BLOCK} steps."),
        *_scaling(workload.name, narrow, charts, x_range),
        name=workload.name,
    )


def _scaling(
    name: str, runs: Sequence[Run], charts: "dict[str, figure]", x_range: "Range1d"
) -> list[str]:
    """Draw what FP16 and the scale made of the gradients."""
    if not runs:
        return []
    from buoy.report.figures import scale_chart  # noqa: PLC0415
    from buoy.report.heat import binades, has_map, heat_map, shares_chart  # noqa: PLC0415

    charts[f"{name} scale"] = scale_chart(runs, x_range)
    charts[f"{name} lost"] = shares_chart(runs, x_range)
    lost = "that is zero or has lost digits."
    boxes = [
        figure_box(slot(f"{name} scale"), "Scale", "and a mark for each skipped step."),
        figure_box(slot(f"{name} lost"), "Share of the gradients", lost),
    ]
    span = binades(runs)
    maps = []
    by_label = {run.label: run for run in runs}
    for label in _MAPS:
        if label not in by_label:
            continue
        run = by_label[label]
        content = '<p class="soft">All gradients are exactly zero.</p>'
        if has_map(run):
            content = slot(f"{name} map {label}")
            charts[f"{name} map {label}"] = heat_map(run, span, x_range)
        maps.append(figure_box(content, label, "where the scaled gradients lie"))
    return [*boxes, f'<div class="maps three">{"".join(maps)}</div>']
