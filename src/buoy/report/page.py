"""One page about one run or several, self-contained: it works offline."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from buoy._core.errors import MissingBackendError, TraceError
from buoy.report.facts import Facts
from buoy.report.markup import details, figure_box, section
from buoy.report.parts import (
    Policies,
    about,
    comparison,
    judgement,
    key,
    layer_table,
    other_policies,
    skips,
)
from buoy.report.run import Run
from buoy.report.sheet import save, sheet, slot
from buoy.report.words import Summary, summary

if TYPE_CHECKING:
    from bokeh.plotting import figure

__all__ = ["html", "write"]

Judged = tuple[Run, Facts, Summary]
Charts = dict[str, "figure"]

_NAMED = 3  # runs in the title


def write(
    runs: Sequence[Run | str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    title: str = "",
    intro: str = "",
    policies: Policies = (),
    progress: Callable[[str], None] | None = None,
) -> Path:
    """Write a page about one run or several to `out`; return its path.

    Args:
        runs: files, or `Run` objects with labels and more curves.
        out: the file; it is replaced completely or not at all.
        title: the title of the page; the runs' names by default.
        intro: sentences below the title.
        policies: replayed over each run; headroom, torch and megatron by default.
        progress: called with what begins, in words.

    Example:
        >>> import tempfile, buoy.report, buoy.trace
        >>> folder = tempfile.TemporaryDirectory()
        >>> with buoy.trace.Recorder(folder.name + "/run.buoy") as recorder:
        ...     recorder.step(scale=65536.0, applied=True, amax=0.5, loss=1.0)
        >>> run = buoy.report.Run(recorder.path, label="first try")
        >>> page = buoy.report.write([run], folder.name + "/report.html")
        >>> "first try" in page.read_text()
        True
        >>> folder.cleanup()
    """
    begin = progress or _ignore
    page = html(runs, title=title, intro=intro, policies=policies, progress=begin)
    begin("Writing the page")
    return save(page, out)


def html(
    runs: Sequence[Run | str | os.PathLike[str]],
    *,
    title: str = "",
    intro: str = "",
    policies: Policies = (),
    progress: Callable[[str], None] | None = None,
) -> str:
    """Return the page of `write` as text."""
    if not runs:
        raise TraceError("A report needs at least one run.")
    known = [run if isinstance(run, Run) else Run(run) for run in runs]
    judged = [(run, run.figures, summary(run.figures)) for run in known]
    chosen = policies if isinstance(policies, Mapping) else tuple(policies)
    begin = progress or _ignore
    begin("Drawing the charts")
    if len(judged) == 1:
        body, charts = _alone(judged[0], chosen, begin)
    else:
        body, charts = _several(judged, chosen, begin)
    return sheet(title or _heading(known), intro or _about(judged), body, charts)


def _ignore(_: str) -> None:
    """Show no progress."""


def _heading(runs: Sequence[Run]) -> str:
    """Describe what the page is about; a file's name alone is not enough."""
    names = [run.label for run in runs[:_NAMED]]
    if len(runs) > _NAMED:
        names.append("...")
    heading = f"Loss scaling in {', '.join(names)}"
    model = runs[0].recording.meta.get("model")
    if len(runs) == 1 and model:
        heading += f" ({model!s:.60})"
    return heading


def _about(judged: Sequence[Judged]) -> str:
    """Sum up in a line what was recorded."""
    if len(judged) > 1:
        return f"{len(judged)} runs, side by side."
    run, found, _ = judged[0]
    meta = run.recording.meta
    parts = [f"{found.steps:,} steps"]
    parts += [f"{key} {meta[key]!s:.60}" for key in ("policy", "format") if key in meta]
    return f"{', '.join(parts)}."


def _alone(
    judged: Judged, policies: Policies, begin: Callable[[str], None]
) -> tuple[str, Charts]:
    """Return the body of a page about one run, and its charts."""
    run, found, said = judged
    charts = _charts([run])
    parts = [judgement(run, found, said)]
    if found.steps:
        layers = layer_table(run, found, "layers-0")
        missed = skips(run, found, said, "skips-0")
        replayed = other_policies(run, policies, "replay-0", begin)
        parts += [
            *_common(charts, [run]),
            _map_section([run], charts),
            section("Layers", _LAYERS, layers, name="layers"),
            section("Skipped steps", missed, name="skips"),
            section(_REPLAYED, replayed, name="replay"),
        ]
    parts.append(section("About this run", about(run), name="about"))
    return "\n".join(parts), charts


_LAYERS = (
    '<p class="note">Shares of the scaled gradients, means over all histograms. '
    "Zero counts all zeros. Lost is an estimate, from the last histograms, of the "
    "gradients that underflowed; it leaves out those that are always zero. Click a "
    "heading to sort.</p>"
)


_REPLAYED = "What other policies would have done"


def _several(
    judged: Sequence[Judged], policies: Policies, begin: Callable[[str], None]
) -> tuple[str, Charts]:
    """Return the body of a page about several runs, and its charts."""
    runs = [run for run, _, _ in judged]
    charts = _charts(runs)
    parts = [
        section("The runs compared", comparison(judged), name="comparison"),
        *_common(charts, runs),
        _map_section(runs, charts),
    ]
    for i, (run, found, said) in enumerate(judged):
        layers = layer_table(run, found, f"layers-{i}")
        missed = skips(run, found, said, f"skips-{i}")
        replayed = other_policies(run, policies, f"replay-{i}", begin)
        inner = [
            judgement(run, found, said, level=3),
            details(f"Layers ({len(found.layers)})", layers),
            details(f"Skipped steps ({found.skipped})", missed),
            details(_REPLAYED, replayed),
            details("About this run", about(run)),
        ]
        parts.append('<div class="card">' + "\n".join(inner) + "</div>")
    return "\n".join(parts), charts


def _charts(runs: Sequence[Run]) -> Charts:
    """Draw everything, over one common range of steps."""
    try:
        from bokeh.models import Range1d  # noqa: PLC0415 - a large import
    except ImportError as error:
        message = "A report needs Bokeh: `pip install 'buoy-amp[report]'`."
        raise MissingBackendError(message) from error
    from buoy.report.figures import (  # noqa: PLC0415
        headroom_chart,
        loss_charts,
        scale_chart,
    )
    from buoy.report.heat import binades, has_map, heat_map, shares_chart  # noqa: PLC0415

    begun = [run for run in runs if run.rows]
    if not begun:
        return {}
    low = min(run.rows.step[0] for run in begun)
    high = max(run.rows.step[-1] for run in begun) + 1
    margin = max((high - low) * 0.01, 0.5)
    names = 0.0 if len(runs) == 1 else 0.16 * (high - low)  # where the lines end
    x_range = Range1d(start=low - margin, end=high + margin + names, bounds="auto")
    made = {"scale": scale_chart(runs, x_range)}
    if not all(map(math.isnan, chain.from_iterable(r.rows.headroom for r in runs))):
        made["headroom"] = headroom_chart(runs, x_range)
    for name, chart in loss_charts(runs, x_range).items():
        made[f"curve {name}"] = chart
    span = binades(runs)
    for i, run in enumerate(runs):
        if has_map(run):
            made[f"heat {i}"] = heat_map(run, span, x_range)
    if any(run.points for run in runs):
        made["shares"] = shares_chart(runs, x_range)
    return made


def _common(charts: Charts, runs: Sequence[Run]) -> list[str]:
    """Return the sections of the charts that hold all runs."""
    marks = "a mark for every skipped step"
    if len(runs) == 1:
        marks += "; its shape shows the cause"
    hint = "Drag across any chart to zoom into all of them."
    boxes = [figure_box(slot("scale"), "Scale", f"over the steps, {marks}. {hint}")]
    if "headroom" in charts:
        words = "bits between the largest scaled gradient and the format's maximum."
        boxes.append(figure_box(slot("headroom"), "Headroom:", words))
    made = [section("The scale and its headroom", key(runs), *boxes, name="scale")]
    curves = [name for name in charts if name.startswith("curve ")]
    if curves:
        boxes = [
            figure_box(slot(name), _title(name.removeprefix("curve ")), "")
            for name in curves
        ]
        made.append(section("Training", key(runs), *boxes, name="training"))
    return made


def _title(name: str) -> str:
    known = {"loss": "Loss, unscaled", "norm": "Norm of the gradients, unscaled"}
    return known.get(name, name)


def _map_section(runs: Sequence[Run], charts: Charts) -> str:
    """Return the section of the heat maps, one per run, and of the shares."""
    alone = len(runs) == 1
    maps: list[str] = []
    missing: list[str] = []
    for i, run in enumerate(runs):
        place = slot(f"heat {i}")
        if f"heat {i}" not in charts:
            missing.append(_no_map(run, alone=alone))
        elif alone:
            words = "over the steps; stronger colours mean more gradients."
            maps.append(figure_box(place, "Size of the scaled gradients", words))
        else:
            maps.append(figure_box(place, run.label, ""))
    if len(maps) > 1:
        maps = [f'<div class="maps">{"".join(maps)}</div>']
    parts = [*maps, *missing]
    if "shares" in charts:
        what = "that is zero, or so small that digits are lost, in percent."
        parts += [figure_box(slot("shares"), "Share of the gradients", what), key(runs)]
    return section("Where the gradients lie", *parts, name="gradients")


def _no_map(run: Run, *, alone: bool) -> str:
    """Say why there is no map: an empty one would say nothing."""
    if run.recording.shots:
        words = "Every measured gradient is exactly zero or not finite."
    else:
        words = "No histograms were recorded."
    whose = "" if alone else f"<b>{escape(run.label)}</b>: "
    return f'<p class="soft">{whose}{words}</p>'
