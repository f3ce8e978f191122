"""Run the demo's trainings with a live table, and print the results."""

import os
import sys
import webbrowser
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from buoy._core.policies.policy import Policy
from buoy.cli.render import NARROWEST, json_out
from buoy.demo.columns import COLUMNS, Column, column_of
from buoy.demo.pool import Job, cores, run
from buoy.demo.results import Results
from buoy.demo.train import Outcome
from buoy.demo.workloads import WORKLOADS, Workload

__all__ = ["show"]


def show(
    names: Sequence[str],
    extra: Mapping[str, Policy],
    *,
    steps: int | None,
    seeds: int,
    out: str,
    as_json: bool,
) -> bool:
    """Train everything that was asked for, and report; False if it was stopped."""
    columns = [*COLUMNS.values(), *(column_of(spec, p) for spec, p in extra.items())]
    results = Results(_chosen(names), columns)
    whole = _train(results, _jobs(results, steps, seeds), seeds)
    page = _written(results, out, whole=whole)
    if as_json:
        report = None if page is None else str(page)
        json_out({**results.as_dict(), "interrupted": not whole, "report": report})
    else:
        _tell(results, page, whole=whole)
    return whole


def _written(results: Results, out: str, *, whole: bool) -> Path | None:
    """Write the page, unless there is nothing to show or nothing to draw it with."""
    if not results.outcomes or not find_spec("bokeh"):
        return None
    from buoy.demo.page import write  # noqa: PLC0415 - imports Bokeh

    return write(results, out, whole=whole)


def _chosen(names: Sequence[str]) -> list[Workload]:
    """Find workloads by name or by how their names begin."""
    if not names:
        return list(WORKLOADS.values())
    found: dict[str, Workload] = {}
    for name in names:
        meant = [key for key in WORKLOADS if key.startswith(name)]
        if name in WORKLOADS:
            meant = [name]
        if not meant:
            message = (
                f"There is no workload {name!r}. There are {', '.join(WORKLOADS)}."
            )
            raise click.BadParameter(message, param_hint="WORKLOAD")
        found |= {key: WORKLOADS[key] for key in meant}
    return list(found.values())


def _jobs(results: Results, steps: int | None, seeds: int) -> list[Job]:
    """List the trainings, one seed of everything before the next."""
    return [
        Job(workload.name, column, seed, steps or workload.steps)
        for seed in range(seeds)
        for workload in results.workloads
        for column in results.columns
    ]


def _train(results: Results, jobs: list[Job], seeds: int) -> bool:
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        return run(jobs, cores(), _Lines(results, len(jobs)).done)
    bar = Progress(
        "training", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console,
    )  # fmt: skip
    task = bar.add_task("training", total=len(jobs))
    with Live(console=console, transient=True, refresh_per_second=8) as live:

        def done(outcome: Outcome) -> None:
            results.outcomes.append(outcome)
            bar.advance(task)
            live.update(Group(table(results, seeds), bar))

        live.update(Group(table(results, seeds), bar))
        return run(jobs, cores(), done)


class _Lines:
    """Progress without a terminal: a line for each training that has ended."""

    def __init__(self, results: Results, total: int) -> None:
        self._results = results
        self._total = total
        click.echo(f"Training {total} small models, {cores()} at a time.", err=True)

    def done(self, outcome: Outcome) -> None:
        """Take an outcome in, and say so."""
        self._results.outcomes.append(outcome)
        count = len(self._results.outcomes)
        click.echo(
            f"{count}/{self._total} {outcome.workload}, {outcome.column}, seed "
            f"{outcome.seed}: {outcome.score:.4g}, {outcome.skipped} skipped",
            err=True,
        )


def table(results: Results, seeds: int = 0) -> Table:
    """Lay the results out: a row per workload, a column per way."""
    made = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    made.add_column("", no_wrap=True)
    for column in results.columns:
        head = column.name.replace("static ", "static\n")
        made.add_column(head, justify="right", overflow="fold")
    for workload in results.workloads:
        cells = (_cell(results, workload, column, seeds) for column in results.columns)
        made.add_row(workload.name, *cells)
    return made


def _cell(results: Results, workload: Workload, column: Column, seeds: int) -> Text:
    cell = results.cell(workload, column.name)
    if cell is None:
        return Text("...")
    good = results.as_good(workload, column.name)
    text = f"{cell.score:.3g}" if workload.metric == "loss" else f"{cell.score:.3f}"
    if good is False:
        return Text(f"{text}x", style="red")
    if len(cell.outcomes) < seeds:
        return Text(text, style="dim")
    return Text(text, style="green" if good else "")


def _tell(results: Results, page: Path | None, *, whole: bool) -> None:
    console = Console(highlight=False)
    console.width = max(console.width, NARROWEST)
    if not whole:
        console.print("Stopped early. Results so far:")
    console.print(table(results))
    console.print(f"{_metrics(results)}; mean over seeds. x: over 2 % worse than FP32.")
    for claim in results.claims():
        console.print(f"- {claim.text}")
    if page is not None:
        seen = "opened in your browser" if _opened(page) else "open it in a browser"
        console.print(f"\nReport: {page} ({seen}).", soft_wrap=True)
    elif results.outcomes:
        console.print(
            "\nNo report: it needs Bokeh, `pip install 'buoy-amp\\[report]'`."
        )


def _metrics(results: Results) -> str:
    """Say what the figures are: "R^2 (field-1), loss (bce, lower is better)"."""
    found: dict[str, list[str]] = {}
    for workload in results.workloads:
        found.setdefault(workload.metric, []).append(workload.name)
    lower_is_better = {w.metric for w in results.workloads if not w.higher}
    parts = []
    for metric, names in found.items():
        note = "; lower is better" if metric in lower_is_better else ""
        parts.append(f"{metric} ({', '.join(names)}{note})")
    return ", ".join(parts)


def _opened(page: Path) -> bool:
    """Open the page if there is a display to show it on."""
    has_display = sys.platform in {"darwin", "win32"} or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")
    )
    if not has_display or not sys.stdout.isatty():
        return False
    return webbrowser.open(page.resolve().as_uri())
