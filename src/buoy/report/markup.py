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
    head = "".join(
        f'<th scope="col"{_words(i < text)}><button type="button">{escape(column)}'
        "</button></th>"
        for i, column in enumerate(columns)
    )
    body = "\n".join(
        "<tr>" + "".join(_cell(cell, i < text) for i, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    label = f'role="region" aria-label="{escape(caption)}"'
    return (
        f'<div class="scroll" tabindex="0" {label}>'
        f'<table id="{name}"><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody>'
        "</table></div>"
    )


def _words(text: bool) -> str:  # noqa: FBT001
    return ' class="text"' if text else ""


def _cell(cell: Cell, text: bool) -> str:  # noqa: FBT001
    value = "" if cell.value is None else f' data-value="{escape(str(cell.value))}"'
    kinds = [name for name, on in (("text", text), ("wrap", cell.wide)) if on]
    style = ""
    if cell.bar is not None:
        kinds.append("bar")
        style = f' style="--w: {100.0 * min(max(cell.bar, 0.0), 1.0):.2f}%"'
    classes = f' class="{" ".join(kinds)}"' if kinds else ""
    shown = cell.text if cell.markup else escape(cell.text)
    return f"<td{classes}{value}{style}>{shown}</td>"


def details(title: str, inner: str, *, opened: bool = False) -> str:
    """Hide something until it is asked for."""
    state = " open" if opened else ""
    return f"<details{state}><summary>{escape(title)}</summary>{inner}</details>"
