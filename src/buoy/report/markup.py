"""Pieces of HTML; all text from files is escaped."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

__all__ = ["Cell", "chip", "details", "figure_box", "section", "table", "tiles"]

_SIGNS = {"healthy": "&#10003;", "look": "&#9888;", "trouble": "&#10007;"}
_WORDS = {"healthy": "Healthy", "look": "Worth a look", "trouble": "In trouble"}


class Cell(NamedTuple):
    """One cell: what is shown, what it is sorted by, and how long its bar is."""

    text: str
    value: float | str | None = None
    bar: float | None = None  # 0 to 1
    markup: bool = False  # `text` is HTML of our own making
    wide: bool = False


def chip(level: str) -> str:
    """Return the state of a run as a word with a sign, not by colour alone."""
    sign = f'<span aria-hidden="true">{_SIGNS[level]}</span>'
    return f'<span class="chip {level}">{sign} {_WORDS[level]}</span>'


def section(title: str, *parts: str, name: str) -> str:
    """Frame a part of the page."""
    inner = "\n".join(part for part in parts if part)
    return f'<section id="{name}"><h2>{escape(title)}</h2>\n{inner}</section>'


def figure_box(chart: str, title: str, words: str) -> str:
    """Put a chart under what it shows."""
    return (
        f"<figure><figcaption><b>{escape(title)}</b> {escape(words)}</figcaption>"
        f"{chart}</figure>"
    )


def tiles(facts: Iterable[tuple[str, str, str]]) -> str:
    """Show figures: key, name and value of each."""
    made = "".join(
        f'<div class="tile"><div class="value" data-fact="{key}">{escape(value)}</div>'
        f'<div class="name">{escape(name)}</div></div>'
        for key, name, value in facts
    )
    return f'<div class="tiles">{made}</div>'


def table(
    name: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    *,
    text: int = 1,
    caption: str = "",
) -> str:
    """Make a table whose headings sort it; the first `text` columns hold words."""
    headings = [_heading(column, i < text) for i, column in enumerate(columns)]
    lines = []
    for row in rows:
        cells = [_cell(cell, i < text) for i, cell in enumerate(row)]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    head = f"<thead><tr>{''.join(headings)}</tr></thead>"
    body = "\n".join(lines)
    label = f'role="region" aria-label="{escape(caption)}"'
    return (
        f'<div class="scroll" tabindex="0" {label}>'
        f'<table id="{name}">{head}\n<tbody>{body}</tbody></table></div>'
    )


def _heading(column: str, is_text: bool) -> str:  # noqa: FBT001
    classes = ' class="text"' if is_text else ""
    button = f'<button type="button">{escape(column)}</button>'
    return f'<th scope="col"{classes}>{button}</th>'


def _cell(cell: Cell, is_text: bool) -> str:  # noqa: FBT001
    kinds = []
    attributes = ""
    if is_text:
        kinds.append("text")
    if cell.wide:
        kinds.append("wrap")
    if cell.bar is not None:
        kinds.append("bar")
    if kinds:
        attributes += f' class="{" ".join(kinds)}"'
    if cell.value is not None:
        attributes += f' data-value="{escape(str(cell.value))}"'
    if cell.bar is not None:
        percent = 100.0 * min(max(cell.bar, 0.0), 1.0)
        attributes += f' style="--w: {percent:.2f}%"'
    shown = cell.text if cell.markup else escape(cell.text)
    return f"<td{attributes}>{shown}</td>"


def details(title: str, inner: str, *, opened: bool = False) -> str:
    """Hide something until it is asked for."""
    state = " open" if opened else ""
    return f"<details{state}><summary>{escape(title)}</summary>{inner}</details>"
