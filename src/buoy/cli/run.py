"""`buoy run`: run an unedited script with Buoy's scaler, and record it."""

import sys
from contextlib import ExitStack, redirect_stdout
from os import environ
from pathlib import Path
from typing import TYPE_CHECKING

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

    error: BaseException | None = None
    with ExitStack() as stack:
        if as_json:  # what the script prints is not part of the answer
            stack.enter_context(redirect_stdout(sys.stderr))
        options = {} if no_trace else {"trace": trace}
        installed = stack.enter_context(install(chosen, **options))
        installed.on_replaced = settings.note
        try:
            run_program(target, args, module=module)
        except ProgramError:
            raise
        except (Exception, SystemExit, KeyboardInterrupt) as caught:  # noqa: BLE001
            error = caught
    code = exit_code(error)
    hint_at_options(args, code)
    installed.close()
    page = None if page_file is None else _written(installed, page_file)
    if as_json:
        json_out(
            {
                "exit_code": code,
                "scalers": len(installed.scalers),
                "policy": spec,
                "replaced": settings.seen,
                "traces": [str(path) for path in installed.traces],
                "report": None if page is None else str(page),
            }
        )
    else:
        _tell(installed, page)
    return code


class _Settings:
    """Says once which of the script's own settings the policy replaces."""

    def __init__(self, spec: str, *, quiet: bool) -> None:
        first_rank = environ.get("RANK", "0") == "0"
        self._spec = spec
        self._prints = first_rank and not quiet
        self.seen: list[dict[str, object]] = []

    def note(self, settings: dict[str, object]) -> None:
        if settings in self.seen:
            return
        self.seen.append(settings)
        if not self._prints:
            return
        text = f"buoy: policy {self._spec} in place of torch's rule"
        kept = "that rule"
        if settings:
            given = ", ".join(f"{k}={value_text(v)}" for k, v in settings.items())
            text += f", replacing the script's {given}"
            kept = "the script's settings"
        click.echo(f"{text}; `buoy run -p torch` keeps {kept}", err=True)


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


def _written(installed: "Installation", target: Path) -> Path | None:
    """Write the page; if that fails, the script's exit code is still the script's."""
    from buoy.report.page import write  # noqa: PLC0415

    if not installed.traces:
        return None
    try:
        return write(installed.traces, target)
    except (BuoyError, OSError) as error:
        click.echo(f"buoy: no report: {error}", err=True)
        return None


def _tell(installed: "Installation", page: Path | None) -> None:
    """Say what was recorded and where; on stderr, stdout is the script's."""
    if not installed.scalers:
        click.echo(
            "buoy: the script did not create a GradScaler of torch; nothing was "
            "recorded.",
            err=True,
        )
    for path in installed.traces:
        click.echo(f"buoy: recorded {path}", err=True)
    if page is not None:
        click.echo(f"buoy: wrote {page}", err=True)
