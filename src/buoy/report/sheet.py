"""The sheet that every page is written on: head, style, script and runtime."""

import os
import re
import time
from base64 import b64encode
from hashlib import sha256
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from buoy.report.theme import RUNS
from buoy.trace.files import replace_file

if TYPE_CHECKING:
    from bokeh.plotting import figure

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
    replace_file(target, text.encode("utf-8", "backslashreplace"), "report")
    return target


def slot(name: str) -> str:
    """Leave a place for a chart.

    Example:
        >>> slot("scale")
        '<!--chart scale-->'
    """
    return f"<!--chart {name}-->"


def _colours() -> str:
    """Return the runs' colours, as rules of the style sheet."""
    light = "".join(f"--run-{i}: {colour}; " for i, (colour, _) in enumerate(RUNS))
    dark = "".join(f"--run-{i}: {colour}; " for i, (_, colour) in enumerate(RUNS))
    return f':root {{ {light}}}\n:root[data-theme="dark"] {{ {dark}}}\n'


_SCRIPT = re.compile(r"<script[^>]*>(.*?)</script>", re.DOTALL)


def _rules(*markup: str) -> str:
    """Allow these scripts, by their hashes, and no other; nothing from the network."""
    hashes = " ".join(
        f"'sha256-{b64encode(sha256(code.encode()).digest()).decode()}'"
        for text in markup
        for code in _SCRIPT.findall(text)
    )
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def sheet(title: str, intro: str, body: str, charts: "dict[str, figure]") -> str:
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
    own = f"<script>\n{js}</script>"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_rules(runtime, script, own)}">
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
{own}
</body>
</html>
"""
