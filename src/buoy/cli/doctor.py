"""`buoy doctor`: run a script for some steps and say what is wrong with it."""

import sys
from contextlib import ExitStack, redirect_stdout
from typing import TYPE_CHECKING

import click

from buoy.cli.render import fields_of, json_out
from buoy.cli.spec import JSON, PROGRAM, hint_at_options

if TYPE_CHECKING:
    from buoy.diagnose.doctor import Examined

__all__ = ["doctor"]


@click.command(
    short_help="Run a script for some steps, and report mistakes.",
    context_settings={"allow_interspersed_args": False},
)
@click.option(
    "--steps",
    default=50,
    show_default=True,
    type=click.IntRange(min=1),
    help="Steps to watch; then the script is stopped.",
)
@click.option(
    "--force-skip",
    is_flag=True,
    help="Make the tenth step overflow if none was skipped, to see whether schedulers "
    "advance on skips. This changes the run: that batch is lost.",
)
@PROGRAM
@JSON
def doctor(
    target: str,
    args: tuple[str, ...],
    *,
    steps: int,
    force_skip: bool,
    module: bool,
    as_json: bool,
) -> int:
    """Run SCRIPT for some steps, without changes, and report what is wrong with it.

    Works with torch's GradScaler and Buoy's, however they are imported.  ARGS are
    passed to the script; options of this command go before SCRIPT.  The exit code is 0
    if nothing wrong was found, otherwise 1.
    """
    from buoy.diagnose.doctor import examine  # noqa: PLC0415 - imports torch
    from buoy.diagnose.program import exit_code  # noqa: PLC0415

    with ExitStack() as stack:
        if as_json:  # what the script prints is not part of the answer
            stack.enter_context(redirect_stdout(sys.stderr))
        seen = examine(target, args, module=module, steps=steps, force_skip=force_skip)
    code = exit_code(seen.error)
    hint_at_options(args, code)
    if as_json:
        json_out(_document(seen))
    else:
        click.echo(str(seen))
    return code or int(bool(seen.findings))


def _document(seen: "Examined") -> dict[str, object]:
    return {
        "steps": seen.facts.steps,
        "error": None if seen.error is None else repr(seen.error),
        "findings": [fields_of(finding) for finding in seen.findings],
    }
