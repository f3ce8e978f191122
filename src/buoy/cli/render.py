"""Results as text: tables by rich, JSON, numbers in words that people read."""

import dataclasses
import gc
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from buoy._core.text import printable

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = [
    "describe",
    "fields_of",
    "json_out",
    "percent",
    "plain",
    "scale",
    "stages",
    "table",
    "value_text",
]

NARROWEST = 78  # columns that a table gets at least
_NAME = 24  # characters of a name that are kept on one line
_RARELY = 100_000  # new containers between two garbage collections


def json_out(document: dict[str, object]) -> None:
    """Print one JSON object; what JSON has no number for becomes a string."""
    import json  # noqa: PLC0415 - slow to import

    click.echo(json.dumps(plain(document), allow_nan=False))


@contextmanager
def stages(count: int) -> Iterator[Callable[[str], None]]:
    """Show a progress bar on a terminal; yield a function that begins a named stage.

    Garbage is collected rarely meanwhile: a long trace is millions of numbers, and the
    search for cycles takes a tenth of the time.
    """
    usual = gc.get_threshold()
    gc.set_threshold(_RARELY)
    try:
        if not sys.stderr.isatty():
            yield lambda _: None
            return
        with click.progressbar(
            length=count, file=sys.stderr, item_show_func=lambda name: name, width=24
        ) as bar:
            bar.pos = -1  # the first stage begins at 0
            yield lambda name: bar.update(1, printable(name))
            bar.update(1, "")
    finally:
        gc.set_threshold(*usual)


def plain(value: object) -> Any:
    """Convert a value to one that JSON has.

    Example:
        >>> plain({"a": (1.0, float("-inf"))})
        {'a': [1.0, '-inf']}
    """
    if isinstance(value, dict):
        empty = inspect.Parameter.empty  # of **parameters
        return {str(k): plain(v) for k, v in value.items() if v is not empty}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (str, int, float)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(describe(value))
    return str(value)


def describe(value: Any) -> dict[str, Any]:
    """Name a dataclass and list its fields."""
    return {"type": type(value).__name__, **fields_of(value)}


def fields_of(value: "DataclassInstance") -> dict[str, Any]:
    """List the fields of a dataclass; unlike `asdict`, it leaves their values alone."""
    names = [field.name for field in dataclasses.fields(value)]
    return {name: getattr(value, name) for name in names if not name.startswith("_")}


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: int = 0
) -> None:
    """Print a table; the last `right` columns are numbers and keep their width."""
    from rich.box import SIMPLE_HEAD  # noqa: PLC0415 - slow to import
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    made = Table(
        title=Text(printable(title)) if title else None,
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
    )
    longest_name = max(len(row[0]) for row in rows)
    last = len(columns) - 1
    for i, name in enumerate(columns):
        is_number = i > last - right
        made.add_column(
            name,
            justify="right" if is_number else "left",
            overflow="fold",
            no_wrap=is_number,
            min_width=min(longest_name, _NAME) if i == 0 else None,
            max_width=_NAME if 0 < i < last else None,
        )
    for row in rows:
        # Text, not markup: a name may hold brackets.
        made.add_row(*(Text(printable(cell)) for cell in row))
    console = Console(highlight=False)
    # Numbers are never cropped: a narrow terminal wraps the line instead.
    console.width = max(console.width, NARROWEST)
    console.print(made)


def scale(log2: float, digits: int = 0) -> str:
    """Write a scale as a power of two.

    Example:
        >>> scale(16.0), scale(16.26, 1), scale(float("-inf"))
        ('2^16', '2^16.3', '0')
    """
    if not math.isfinite(log2):
        return "0" if log2 == -math.inf else str(log2)
    return f"2^{log2:.{digits}f}"


def percent(share: float | None) -> str:
    """Write a share in percent, with the digits that matter.

    Example:
        >>> percent(0.5), percent(0.00012), percent(0.0), percent(None)
        ('50', '0.012', '0', '-')
    """
    if share is None:
        return "-"
    value = 100.0 * share
    if value != 0.0 and abs(value) < 0.001:
        return f"{value:.0e}"
    return f"{value:.4g}"


def value_text(value: object) -> str:
    """Write a parameter as one would type it.

    Example:
        >>> value_text(65536.0), value_text(0.5), value_text(0.99), value_text(None)
        ('2^16', '0.5', '0.99', 'None')
    """
    if not isinstance(value, float) or not 0.0 < value < math.inf:
        return str(value)
    log2 = math.log2(value)
    if log2.is_integer() and not 1e-2 < value < 1e3:
        return f"2^{log2:.0f}"
    return f"{value:g}"
