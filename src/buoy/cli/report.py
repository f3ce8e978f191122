"""`buoy report`: one page about a recorded run, or several side by side."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from buoy._core.text import printable
from buoy.cli.render import fields_of, json_out, stages
from buoy.cli.replay import USUAL, named
from buoy.cli.spec import JSON, policy_option

if TYPE_CHECKING:
    from buoy.report.run import Run

__all__ = ["report"]


@click.command(short_help="Write a page about recorded runs.")
@click.argument("sources", metavar="FILE...", nargs=-1, required=True)
@click.option(
    "-o",
    "--out",
    default="report.html",
    show_default=True,
    metavar="HTML",
    help="Where to write the page.",
)
@click.option(
    "-l",
    "--label",
    "labels",
    multiple=True,
    metavar="TEXT",
    help="The label of a run, in the order of the files. Repeatable.",
)
@click.option("--title", default="", help="The title of the page.")
@policy_option(
    f"A policy to replay over each run. Repeatable. [default: {', '.join(USUAL)}]"
)
@click.option("--open", "open_it", is_flag=True, help="Open the page in a browser.")
@JSON
def report(
    sources: tuple[str, ...],
    out: str,
    labels: tuple[str, ...],
    title: str,
    specs: tuple[str, ...],
    *,
    open_it: bool,
    as_json: bool,
) -> None:
    """Write one self-contained page about the recorded runs in FILE.

    The page works offline.  It shows the scale and the skipped steps, the headroom, the
    sizes of the gradients, the layers that lose most, and what other policies would
    have done.
    """
    from buoy.report.page import write  # noqa: PLC0415 - imports only what is used
    from buoy.report.run import Run  # noqa: PLC0415

    if len(labels) > len(sources):
        message = f"{len(labels)} labels were given for {len(sources)} files."
        raise click.BadParameter(message, param_hint="--label")
    names = [*labels, *[""] * (len(sources) - len(labels))]
    policies = named(specs or USUAL)
    of_a_run = len(policies) + 2  # read it, replay the policies and the oracle
    of_the_page = 2  # draw it, write it
    with stages(len(sources) * of_a_run + of_the_page) as begin:
        runs = []
        for path, name in zip(sources, names, strict=True):
            begin(f"Reading {Path(path).name}")
            runs.append(Run(path, name))
        page = write(runs, out, title=title, policies=policies, progress=begin)
    if as_json:
        json_out(
            {
                "report": str(page),
                "bytes": page.stat().st_size,
                "runs": [_as_dict(run) for run in runs],
            }
        )
    else:
        _print(runs, page)
    if open_it:
        click.launch(page.absolute().as_uri())


def _as_dict(run: "Run") -> dict[str, object]:
    from buoy.report.words import summary  # noqa: PLC0415

    said = summary(run.figures)
    facts = fields_of(run.figures)
    del facts["layers"]
    return {
        "run": run.label,
        "level": said.level,
        "headline": said.headline,
        "sentences": said.sentences,
        **facts,
    }


def _print(runs: "list[Run]", page: Path) -> None:
    from textwrap import fill  # noqa: PLC0415

    from buoy.report.words import summary  # noqa: PLC0415

    for run in runs:
        said = summary(run.figures)
        click.echo(fill(printable(f"{run.label}: {said.headline}."), 80))
        for sentence in said.sentences:
            text = printable(sentence)
            click.echo(fill(text, 80, initial_indent="  ", subsequent_indent="  "))
    click.echo(f"The page is {printable(str(page))}.")
