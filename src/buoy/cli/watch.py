"""`buoy watch`: a live view of a running job."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from buoy._core.errors import TraceError
from buoy._core.text import printable
from buoy.cli.render import fields_of, json_out
from buoy.cli.spec import FILE, JSON

if TYPE_CHECKING:
    from buoy.report.watch import Follower

__all__ = ["watch"]

_LAYERS = 6  # that are printed, the worst


@click.command(short_help="Watch a run while it is recorded.")
@FILE
@click.option("--once", is_flag=True, help="Print the current state and exit.")
@click.option(
    "--every",
    type=click.FloatRange(0.05, 3600.0),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Seconds between two updates of the display.",
)
@JSON
def watch(source: str, every: float, *, once: bool, as_json: bool) -> None:
    """Watch the run that is being recorded in FILE until it ends.

    It waits for the file if it does not exist yet.  Without a terminal, it prints a
    line whenever there is something new.
    """
    from buoy.report.watch import Follower  # noqa: PLC0415 - only what is used

    follower = Follower(source)
    if once:
        follower.look()
        _show(follower, as_json=as_json, frame=True)
        return
    try:
        _wait(source, every)
        if as_json or not sys.stdout.isatty():
            _print_on(follower, every, as_json=as_json)
        else:
            _draw_on(follower, every)
    except KeyboardInterrupt:
        click.echo("")


def _wait(source: str, every: float) -> None:
    if "\0" in source:
        raise TraceError(f"Not a valid file name: {source!r}.")
    path = Path(source)
    if not path.exists():
        click.echo(f"Waiting for {printable(source)}.", err=True)
    while not _has_begun(path):
        time.sleep(every)


def _has_begun(path: Path) -> bool:
    if not path.is_file():
        return path.exists()  # reading it says what it is instead
    return path.stat().st_size > 0


def _print_on(follower: "Follower", every: float, *, as_json: bool) -> None:
    """Print a line whenever there is something new."""
    while True:
        if follower.look():
            _show(follower, as_json=as_json, frame=False)
        if follower.recording is not None and follower.recording.ended:
            return
        time.sleep(every)


def _draw_on(follower: "Follower", every: float) -> None:
    from rich.console import Console  # noqa: PLC0415 - slow to import
    from rich.live import Live  # noqa: PLC0415

    from buoy.report.watch import view  # noqa: PLC0415

    console = Console()
    blocks = _has_blocks(console.encoding)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            follower.look()
            live.update(view(follower, blocks=blocks), refresh=True)
            if follower.recording is not None and follower.recording.ended:
                return
            time.sleep(every)


def _show(follower: "Follower", *, as_json: bool, frame: bool) -> None:
    from buoy.report.watch import line, view  # noqa: PLC0415

    if as_json:
        json_out(_as_dict(follower))
    elif frame:
        from rich.console import Console  # noqa: PLC0415

        console = Console(highlight=False)
        console.print(view(follower, blocks=_has_blocks(console.encoding)))
    else:
        click.echo(line(follower))


def _as_dict(follower: "Follower") -> dict[str, object]:
    from buoy.report.words import summary  # noqa: PLC0415

    found = follower.facts()
    said = summary(found)
    facts = fields_of(found)
    facts["layers"] = found.layers[:_LAYERS]
    return {"level": said.level, "headline": said.headline, **facts}


def _has_blocks(encoding: str) -> bool:
    try:
        "\u2588".encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True
