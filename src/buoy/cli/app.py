"""The group of commands, and what becomes of errors."""

import shutil
import textwrap

import click

from buoy._core.errors import BuoyError
from buoy._core.text import printable
from buoy._version import __version__
from buoy.cli.demo import demo
from buoy.cli.doctor import doctor
from buoy.cli.formats import formats
from buoy.cli.policies import policies
from buoy.cli.replay import replay
from buoy.cli.report import report
from buoy.cli.run import run as run_script
from buoy.cli.tune import tune
from buoy.cli.watch import watch

__all__ = ["app", "run"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="buoy")
def app() -> None:
    """Loss scaling for mixed-precision training: check, record and compare runs.

    Every command takes --json.  Exit codes: 0 done, 1 invalid input (a
    file, a policy), 2 wrong usage.
    """


COMMANDS = (
    demo, doctor, formats, policies, replay, report, run_script, tune, watch,
)  # fmt: skip

for command in COMMANDS:
    app.add_command(command)


def run() -> int:
    """Run the group; return the exit code."""
    try:
        # Not standalone: click would print its errors wider than the terminal.
        code = app.main(prog_name="buoy", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return error.exit_code
    except click.ClickException as error:
        return _failed(error.format_message(), error)
    except click.Abort:
        return _failed("Aborted.")
    except BuoyError as error:
        return _failed(str(error))
    return code if isinstance(code, int) else 0


def _failed(message: str, error: click.ClickException | None = None) -> int:
    """Say what went wrong, within the terminal; return the exit code."""
    if isinstance(error, click.UsageError) and error.ctx is not None:
        click.echo(error.ctx.get_usage(), err=True)
        click.echo(f"Try '{error.ctx.command_path} --help' for help.\n", err=True)
    width = max(20, min(80, shutil.get_terminal_size().columns))
    text = textwrap.fill(
        f"Error: {printable(' '.join(message.split()))}",
        width,
        break_on_hyphens=False,
        break_long_words=False,
    )
    click.echo(text, err=True)
    return 1 if error is None else error.exit_code
