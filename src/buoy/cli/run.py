"""`buoy run`: run an unedited script with Buoy's scaler, and record it."""

import sys
from contextlib import ExitStack, redirect_stdout
from os import environ
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from buoy._core.errors import BuoyError, MissingBackendError
from buoy._core.policies.policy import Policy
from buoy._core.policies.registry import policy as make
from buoy.cli.render import json_out, value_text
from buoy.cli.spec import JSON, PROGRAM, hint_at_options, parsed

if TYPE_CHECKING:
    from buoy.integrations.install import Installation

__all__ = ["run"]

_PAGE = "report.html"  # as `buoy report` has it


@click.command(
    short_help="Run a script with Buoy's scaler, and record it.",
    context_settings={"allow_interspersed_args": False},
)
@click.option(
    "-p",
    "--policy",
    "spec",
    metavar="NAME[:key=value,...]",
    default="headroom",
    show_default=True,
    help="The policy that sets the scale, instead of the script's own settings; "
    "`torch` alone is torch's rule with the script's settings.",
)
@click.option(
    "--trace",
    type=click.Path(dir_okay=False, path_type=Path),
    default="run.buoy",
    show_default=True,
    help="The file to record the run in.",
)
@click.option("--no-trace", is_flag=True, help="Record nothing.")
@click.option(
    "--report",
    is_flag=True,
    help=f"Write a report to {_PAGE} when the run has ended.",
)
@click.option(
    "--report-file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="HTML",
    help="Write the report to this file instead.",
)
@PROGRAM
@JSON
def run(
    target: str,
    args: tuple[str, ...],
    *,
    spec: str,
    trace: Path,
    no_trace: bool,
    report: bool,
    report_file: Path | None,
    module: bool,
    as_json: bool,
) -> int:
    """Run SCRIPT with Buoy's scaler in place of torch's, and record a trace.

    The script needs no change, however it or a library imports GradScaler.  ARGS are
    passed to the script; options of this command go before SCRIPT.  The exit code is
    the script's.
    """
    chosen = _policy(spec)
    page_file = report_file or (Path(_PAGE) if report else None)
    _check_report(page_file, no_trace=no_trace)
    settings = _Settings(spec, quiet=as_json)
    # These import torch.
    from buoy.diagnose.program import (  # noqa: PLC0415
        ProgramError,
        exit_code,
        run_program,
    )
    from buoy.integrations.install import install  # noqa: PLC0415

    with ExitStack() as stack:
        if as_json:  # what the script prints is not part of the answer
            stack.enter_context(redirect_stdout(sys.stderr))
        options = {} if no_trace else {"trace": trace}
        made = stack.enter_context(install(chosen, **options))
        made.on_replaced = settings.note
        error = None
        try:
            run_program(target, args, module=module)
        except ProgramError:
            raise
        except (Exception, SystemExit, KeyboardInterrupt) as caught:  # noqa: BLE001
            error = caught
    code = exit_code(error)
    hint_at_options(args, code)
    made.close()
    page = None if page_file is None else _written(made, page_file)
    if as_json:
        json_out(
            {
                "exit_code": code,
                "scalers": len(made.scalers),
                "policy": spec,
                "replaced": settings.seen,
                "traces": [str(path) for path in made.traces],
                "report": None if page is None else str(page),
            }
        )
    else:
        _tell(made, page)
    return code


class _Settings:
    """Says once which of the script's own settings the policy replaces."""

    def __init__(self, spec: str, *, quiet: bool) -> None:
        # Only one of several ranks prints.
        self._spec, self._quiet = spec, quiet or environ.get("RANK", "0") != "0"
        self.seen: list[dict[str, Any]] = []

    def note(self, settings: dict[str, Any]) -> None:
        if settings in self.seen:
            return
        self.seen.append(settings)
        if self._quiet:
            return
        what, kept = "", "that rule"
        if settings:
            given = ", ".join(
                f"{key}={value_text(value)}" for key, value in settings.items()
            )
            what, kept = f", replacing the script's {given}", "the script's settings"
        click.echo(
            f"buoy: policy {self._spec} in place of torch's rule{what}; "
            f"`buoy run -p torch` keeps {kept}",
            err=True,
        )


def _policy(spec: str) -> Policy | None:
    """Make the policy; None for torch's rule with the script's own settings."""
    name, parameters = parsed(spec)
    if name == "torch" and not parameters:
        return None
    return make(name, **parameters)


def _check_report(report: Path | None, *, no_trace: bool) -> None:
    """Say before the script runs, not after, that there can be no report."""
    if report is None:
        return
    if no_trace:
        message = "A report needs a trace: remove `--no-trace`."
        raise click.UsageError(message)
    from importlib.util import find_spec  # noqa: PLC0415

    if find_spec("bokeh") is None:
        message = (
            "`--report` needs Bokeh, which is not installed. Install it with "
            '`python -m pip install "buoy-amp[report]"`.'
        )
        raise MissingBackendError(message)


def _written(made: "Installation", target: Path) -> Path | None:
    """Write the page; if that fails, the script's exit code is still the script's."""
    from buoy.report.page import write  # noqa: PLC0415

    try:
        return write(made.traces, target) if made.traces else None
    except (BuoyError, OSError) as error:
        click.echo(f"buoy: no report: {error}", err=True)
        return None


def _tell(made: "Installation", page: Path | None) -> None:
    """Say what was recorded and where; on stderr, stdout is the script's."""
    if not made.scalers:
        click.echo(
            "buoy: the script did not create a GradScaler of torch; nothing was "
            "recorded.",
            err=True,
        )
    for path in made.traces:
        click.echo(f"buoy: recorded {path}", err=True)
    if page is not None:
        click.echo(f"buoy: wrote {page}", err=True)
