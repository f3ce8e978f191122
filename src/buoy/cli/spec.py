"""What people type: NAME[:key=value,...], and FILE or synthetic:KIND.

NAME is an installed policy, or one of the user's own: MODULE:CLASS, FILE.py:CLASS.
"""

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from math import log2
from pathlib import Path
from runpy import run_path
from typing import Any, TypeVar

import click

from buoy._core.errors import BuoyError, PolicyError, UnknownPolicyError
from buoy._core.formats import FORMATS, number_format
from buoy._core.policies.policy import Policy
from buoy._core.policies.registry import policies
from buoy._core.policies.registry import policy as make
from buoy._core.replay.trace import Trace

__all__ = [
    "FILE", "FORMAT", "JSON", "PROGRAM", "chosen", "hint_at_options", "made",
    "opened", "parsed", "policy_option", "value_of",
]  # fmt: skip

Command = TypeVar("Command", bound=Callable[..., object])

_POWER = re.compile(r"(-?\d+(?:\.\d+)?)(?:\*\*|\^)(-?\d+(?:\.\d+)?)")
_WORDS = {"true": True, "false": False, "none": None}

FILE = click.argument("source", metavar="FILE")
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
FORMAT = click.option(
    "-f",
    "--format",
    "number_format",
    type=click.Choice(list(FORMATS)),
    help="Use the limits of this format, instead of the recorded one's.",
)
_POLICY = "NAME[:key=value,...]"
_USAGE = 2  # the exit code with which argparse and click refuse arguments


def policy_option(text: str) -> Callable[[Command], Command]:
    """Take any number of policies; `text` says what for."""
    return click.option(
        "-p", "--policy", "specs", metavar=_POLICY, multiple=True, help=text
    )


def PROGRAM(command: Command) -> Command:  # noqa: N802 - a decorator like those above
    """Take a script or a module to run, and its own arguments."""
    for option in (
        click.argument("args", nargs=-1, type=click.UNPROCESSED),
        click.argument("target", metavar="SCRIPT"),
        click.option(
            "-m", "--module", is_flag=True, help="SCRIPT is a module, as in python -m."
        ),
    ):
        command = option(command)
    return command


def hint_at_options(args: tuple[str, ...], code: int) -> None:
    """Say which arguments that the script refused are options of the command."""
    if code != _USAGE:
        return
    context = click.get_current_context()
    own = {name for param in context.command.params for name in param.opts}
    meant = [arg for arg in args if arg.partition("=")[0] in own and arg[:1] == "-"]
    if meant:
        command = context.command_path
        click.echo(
            f"buoy: {', '.join(f'`{arg}`' for arg in meant)} went to the script. "
            f"Options of `{command}` go before it: `{command} {meant[0]} SCRIPT ...`.",
            err=True,
        )


def parsed(text: str) -> tuple[str, dict[str, Any]]:
    """Split NAME[:key=value,...] into the name and its parameters.

    Example:
        >>> parsed("torch:init_scale=2**10,growth_interval=500")
        ('torch', {'init_scale': 1024, 'growth_interval': 500})
    """
    name, _, rest = text.partition(":")
    parameters = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not name or not key.strip() or not equals or not value.strip():
            message = f"{item!r} is not key=value, e.g. growth_interval=500."
            raise click.BadParameter(message, param_hint=_POLICY)
        if key.strip() in parameters:
            message = f"`{key.strip()}` is given twice in {text!r}."
            raise click.BadParameter(message, param_hint=_POLICY)
        parameters[key.strip()] = value_of(value.strip())
    return name.strip(), parameters


def chosen(text: str) -> tuple[str | Callable[..., Policy], dict[str, Any]]:
    """Find the policy that was typed: a name or a class, and its parameters.

    Example:
        >>> chosen("buoy:Static:init_scale=2**10")
        (<class 'buoy._core.policies.static.Static'>, {'init_scale': 1024})
    """
    where, _, rest = text.partition(":")
    # C:\\policies.py:Mine has a colon in its file's name.
    drive = len(where) == 1 and rest[:1] in {"\\", "/"}
    if drive:
        more, _, rest = rest.partition(":")
        where = f"{where}:{more}"
    name, _, parameters = rest.partition(":")
    if not name.isidentifier() or where in policies():
        return parsed(text)
    return _own(where, name), parsed(f"{name}:{parameters}")[1]


def made(text: str) -> Policy:
    """Make the policy that was typed."""
    found, parameters = chosen(text)
    if isinstance(found, str):
        return make(found, **parameters)
    return make(_built(text, found, parameters))


def _built(
    text: str, build: Callable[..., Policy], parameters: dict[str, Any]
) -> Policy:
    try:
        return build(**parameters)
    except BuoyError:
        raise
    except Exception as error:
        message = (
            f"The policy {text!r} cannot be created: {type(error).__name__}: {error}"
        )
        raise PolicyError(message) from error


def _own(where: str, name: str) -> Callable[..., Policy]:
    """Import a class of the user's own: this runs the code that was named."""
    try:
        if where.endswith(".py"):
            names = run_path(where)
        else:
            # As `python -m` has it: modules of the current folder are found.
            sys.path.insert(0, str(Path.cwd()))
            names = vars(import_module(where))
    except (Exception, SystemExit) as error:
        message = (
            f"Cannot import {where!r} for the policy {where}:{name}: "
            f"{type(error).__name__}: {error}. Name an installed policy (`buoy "
            "policies`), MODULE:CLASS or FILE.py:CLASS."
        )
        raise UnknownPolicyError(message) from error
    found: Callable[..., Policy] | None = names.get(name)
    if not callable(found):
        classes = [key for key, value in names.items() if isinstance(value, type)]
        message = (
            f"{where!r} has no class {name!r}. It has: {', '.join(classes) or 'none'}."
        )
        raise UnknownPolicyError(message)
    return found


def value_of(text: str) -> Any:
    """Read a number, true, false, none, or else a name.

    Example:
        >>> [value_of(text) for text in ("2^-3", "500", "1e-3", "true", "clean")]
        [0.125, 500, 0.001, True, 'clean']
    """
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    power = _POWER.fullmatch(text)
    if power:
        return _power(text, *power.groups())
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _power(text: str, base: str, exponent: str) -> float:
    try:
        value = float(base) ** float(exponent)
    except (OverflowError, ZeroDivisionError) as error:
        message = f"{text!r} is not a number that fits in a float."
        raise click.BadParameter(message) from error
    if isinstance(value, complex):
        message = f"{text!r} is not a real number."
        raise click.BadParameter(message)
    typed_whole = "." not in base + exponent
    is_exact = value.is_integer() and abs(value) < 2**53
    return int(value) if typed_whole and is_exact else value


def opened(source: str, format_name: str | None = None) -> Trace:
    """Read the trace that was named, or invent it."""
    if source.startswith("synthetic:"):
        trace = _invented(source.removeprefix("synthetic:"))
    else:
        from buoy.trace.read import read  # noqa: PLC0415 - only where a file is read

        trace = read(source)
    if format_name is None:
        return trace
    limits = number_format(format_name)
    zero = limits.smallest_subnormal / 2
    return replace(trace, max_log2=limits.max_log2, zero_log2=log2(zero))


def _invented(text: str) -> Trace:
    from buoy.trace.synthetic import synthetic  # noqa: PLC0415 - imports random

    kind, settings = parsed(text)
    numbers = {"steps": 10_000, "seed": 0}
    for key, value in settings.items():
        if key not in numbers or not isinstance(value, int):
            message = (
                f"{key}={value} does not fit a synthetic trace: "
                "it takes whole numbers for steps and seed."
            )
            raise click.BadParameter(message)
        numbers[key] = value
    return synthetic(kind, **numbers)
