"""`buoy run`: run a script on Buoy's scaler, unedited, and record it."""

import sys
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import click

from buoy._core.policy import Policy
from buoy._core.registry import policy as make
from buoy.cli.render import json_out
from buoy.cli.spec import JSON, PROGRAM, parsed

if TYPE_CHECKING:
    from buoy.diagnose.replace import Replacement

__all__ = ["run"]


@click.command(
    short_help="Run a script on Buoy's scaler and record it.",
    context_settings={"allow_interspersed_args": False},
)
@click.option(
    "-p",
    "--policy",
    "spec",
    metavar="NAME[:key=value,...]",
    help="The policy that moves the scale, in place of the script's own settings. "
    "[default: torch's rule, with the script's settings]",
)
@click.option(
    "--trace",
    type=click.Path(dir_okay=False, path_type=Path),
    default="run.buoy",
    show_default=True,
    help="The file to record the run in.",
)
@click.option("--no-trace", is_flag=True, help="Record nothing.")
@PROGRAM
@JSON
def run(
    target: str,
    args: tuple[str, ...],
    *,
    spec: str | None,
    trace: Path,
    no_trace: bool,
    module: bool,
    as_json: bool,
) -> int:
    """Run SCRIPT with Buoy's scaler in the place of torch's, and record a trace.

    No edit is needed, whichever way the script or a library it uses imports
    GradScaler.  ARGS are the script's own; options of this command go before SCRIPT.
    The exit code is the script's.
    """
    chosen = _policy(spec)
    # These import torch.
    from buoy.diagnose.program import (  # noqa: PLC0415
        ProgramError,
        exit_code,
        run_program,
    )
    from buoy.diagnose.replace import Replacement, replaced  # noqa: PLC0415

    with ExitStack() as stack:
        if as_json:  # what the script prints is not part of the answer
            stack.enter_context(redirect_stdout(sys.stderr))
        made = Replacement(chosen, None if no_trace else trace)
        stack.enter_context(replaced(made))
        error = None
        try:
            run_program(target, args, module=module)
        except ProgramError:
            raise
        except (Exception, SystemExit, KeyboardInterrupt) as caught:  # noqa: BLE001
            error = caught
    code = exit_code(error)
    made.close()
    _tell(made, as_json=as_json, code=code)
    return code


def _policy(spec: str | None) -> Policy | None:
    if spec is None:
        return None
    name, parameters = parsed(spec)
    return make(name, **parameters)


def _tell(made: "Replacement", *, as_json: bool, code: int) -> None:
    """Say what was recorded and where; on stderr, stdout is the script's."""
    traces = [str(path) for path in made.traces]
    if as_json:
        json_out(
            {
                "exit_code": code,
                "scalers": len(made.made),
                "traces": traces,
            }
        )
    elif not made.made:
        click.echo("buoy: the script made no GradScaler; nothing recorded.", err=True)
    elif traces:
        click.echo(f"buoy: recorded {', '.join(traces)}", err=True)
