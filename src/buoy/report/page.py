"""One page about one run or several, self-contained: it works offline."""

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from itertools import chain
from pathlib import Path
from typing import Any

from buoy._core.errors import MissingBackendError, TraceError
from buoy._core.policies.policy import Policy
from buoy.report.facts import Facts
from buoy.report.markup import details, figure_box, section
from buoy.report.parts import (
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

__all__ = ["html", "write"]

Policies = Mapping[str, str | Policy] | Iterable[str | Policy]
Judged = tuple[Run, Facts, Summary]


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
    judged = [(run, found := run.figures, summary(found)) for run in known]
    chosen = policies if isinstance(policies, Mapping) else tuple(policies)
    begin = progress or _ignore
    begin("Drawing the charts")
    if len(judged) == 1:
        body = _alone(*judged[0], chosen, begin)
    else:
        body = _several(judged, chosen, begin)
    return sheet(title or _heading(known), intro or _about(judged), *body)


def _ignore(_: str) -> None:
    """Show no progress."""


def _heading(runs: Sequence[Run]) -> str:
    """Describe what the page is about; a file's name alone is not enough."""
    names = [run.label for run in runs[:3]] + ["..."] * (len(runs) > 3)
    model = runs[0].recording.meta.get("model")
    what = f" ({model!s:.60})" if len(runs) == 1 and model else ""
    return f"Loss scaling in {', '.join(names)}{what}"


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
    run: Run, found: Facts, said: Summary, policies: Any, begin: Callable[[str], None]
) -> tuple[str, Any]:
    charts = _charts([run])
    parts = [judgement(run, found, said)]
    if found.steps:
        parts += _common(charts, [run])
        parts += [_map_section([run], charts)]
        parts += [
            section(
                "Layers", _LAYERS, layer_table(run, found, "layers-0"), name="layers"
            ),
            section("Skipped steps", skips(run, found, said, "skips-0"), name="skips"),
            section(
                "What other policies would have done",
                other_policies(run, policies, "replay-0", begin),
                name="replay",
            ),
        ]
    parts += [section("About this run", about(run), name="about")]
    return "\n".join(parts), charts


_LAYERS = (
    '<p class="note">Shares of the scaled gradients, means over all histograms. '
    "Zero counts all zeros. Lost is an estimate, from the last histograms, of the "
    "gradients that underflowed; it leaves out those that are always zero. Click a "
    "heading to sort.</p>"
)


def _several(
    judged: Sequence[Judged], policies: Any, begin: Callable[[str], None]
) -> tuple[str, Any]:
    runs = [run for run, _, _ in judged]
    charts = _charts(runs)
    parts = [section("The runs compared", comparison(judged), name="comparison")]
    parts += _common(charts, runs)
    parts += [_map_section(runs, charts)]
    for i, (run, found, said) in enumerate(judged):
        inner = [
            judgement(run, found, said, level=3),
            details(
                f"Layers ({len(found.layers)})", layer_table(run, found, f"layers-{i}")
            ),
            details(
                f"Skipped steps ({found.skipped})",
                skips(run, found, said, f"skips-{i}"),
            ),
            details(
                "What other policies would have done",
                other_policies(run, policies, f"replay-{i}", begin),
            ),
            details("About this run", about(run)),
        ]
        parts.append('<div class="card">' + "\n".join(inner) + "</div>")
    return "\n".join(parts), charts


def _charts(runs: Sequence[Run]) -> dict[str, Any]:
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

    low = min((run.rows.step[0] for run in runs if run.rows), default=0)
    high = max((run.rows.step[-1] for run in runs if run.rows), default=0) + 1
    margin = max((high - low) * 0.01, 0.5)
    names = 0.0 if len(runs) == 1 else 0.16 * (high - low)  # where the lines end
    x_range = Range1d(start=low - margin, end=high + margin + names, bounds="auto")
    if not any(run.rows for run in runs):
        return {}
    made = {"scale": scale_chart(runs, x_range)}
    if not all(map(math.isnan, chain.from_iterable(r.rows.headroom for r in runs))):
        made["headroom"] = headroom_chart(runs, x_range)
    made |= {f"curve {n}": c for n, c in loss_charts(runs, x_range).items()}
    span = binades(runs)
    for i, run in enumerate(runs):
        if has_map(run):
            made[f"heat {i}"] = heat_map(run, span, x_range)
    if any(run.points for run in runs):
        made["shares"] = shares_chart(runs, x_range)
    return made


def _common(charts: dict[str, Any], runs: Sequence[Run]) -> list[str]:
    marks = "a mark for every skipped step" + (
        "; its shape shows the cause" if len(runs) == 1 else ""
    )
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


def _map_section(runs: Sequence[Run], charts: dict[str, Any]) -> str:
    maps = [
        figure_box(
            slot(f"heat {i}"),
            "Size of the scaled gradients" if len(runs) == 1 else run.label,
            "over the steps; stronger colours mean more gradients."
            if len(runs) == 1
            else "",
        )
        for i, run in enumerate(runs)
        if f"heat {i}" in charts
    ]
    parts = maps if len(maps) < 2 else [f'<div class="maps">{"".join(maps)}</div>']
    for i, run in enumerate(runs):
        if f"heat {i}" not in charts:
            parts.append(_no_map(run, alone=len(runs) == 1))
    if "shares" in charts:
        what = "that is zero, or so small that digits are lost, in percent."
        parts += [figure_box(slot("shares"), "Share of the gradients", what), key(runs)]
    return section("Where the gradients lie", *parts, name="gradients")


def _no_map(run: Run, *, alone: bool) -> str:
    """Say why there is no map: an empty one would say nothing."""
    words = "No histograms were recorded."
    if run.recording.shots:
        words = "Every measured gradient is exactly zero or not finite."
    whose = "" if alone else f"<b>{escape(run.label)}</b>: "
    return f'<p class="soft">{whose}{words}</p>'
