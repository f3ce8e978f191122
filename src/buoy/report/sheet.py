"""The sheet that every page is written on: head, style, script and runtime."""

import os
import time
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from buoy._core.errors import TraceError
from buoy.report.theme import RUNS

__all__ = ["save", "sheet", "slot"]

_BUOY = (
    '<svg viewBox="0 0 24 24" aria-hidden="true" fill="currentColor"><path d="M11 2h2'
    "v3h-2zM9.2 6h5.6l2.4 9H6.8zM3 17c1.5 0 1.5 1 3 1s1.5-1 3-1 1.5 1 3 1 1.5-1 3-1 "
    "1.5 1 3 1 1.5-1 3-1v2c-1.5 0-1.5 1-3 1s-1.5-1-3-1-1.5 1-3 1-1.5-1-3-1-1.5 1-3 1-1"
    '.5-1-3-1z"/></svg>'
)


def save(text: str, out: str | os.PathLike[str]) -> Path:
    """Write a page, whole or not at all; return where it is."""
    target = Path(out)
    part = target.with_name(target.name + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(target)
    except OSError as error:
        message = (
            f"Cannot write the report {str(target)!r}: {error.strerror or error}. "
            "Name a file in a folder that exists and may be written to."
        )
        raise TraceError(message) from error
    return target


def slot(name: str) -> str:
    """Leave a place for a chart.

    Example:
        >>> slot("scale")
        '<!--chart scale-->'
    """
    return f"<!--chart {name}-->"


def _colours() -> str:
    """Give the runs' colours to the style sheet."""
    light, dark = (
        "".join(f"--run-{i}: {pair[coat]}; " for i, pair in enumerate(RUNS))
        for coat in (0, 1)
    )
    return f':root {{ {light}}}\n:root[data-theme="dark"] {{ {dark}}}\n'


def sheet(title: str, intro: str, body: str, charts: dict[str, Any]) -> str:
    """Put a page together; charts go where `slot` has left a place for them."""
    from bokeh.embed import components  # noqa: PLC0415
    from bokeh.resources import Resources  # noqa: PLC0415

    drawn = {name.replace(" ", "_"): chart for name, chart in charts.items()}
    script, places = components(drawn) if drawn else ("", {})
    for name in charts:
        body = body.replace(slot(name), places[name.replace(" ", "_")])
    resources = Resources(mode="inline", components=["bokeh"])
    runtime = resources.render_js() if drawn else ""
    folder = files("buoy.report")
    css = _colours() + folder.joinpath("page.css").read_text("utf-8")
    js = folder.joinpath("page.js").read_text("utf-8")
    made_at = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    words = f"<p>{escape(intro)}</p>" if intro else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(title)} - Buoy report</title>
<style>
{css}</style>
{runtime}
</head>
<body>
<div class="wrap">
<header><div><span class="mark">{_BUOY}Buoy report</span><h1>{escape(title)}</h1>{words}
</div><button type="button" class="toggle" id="theme">Dark</button></header>
<main>
{body}
</main>
<footer>Made by Buoy on {made_at}. Everything on this page is in this one file.</footer>
</div>
{script}
<script>
{js}</script>
</body>
</html>
"""
