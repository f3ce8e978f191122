"""`buoy policies`: every policy and preset, with its parameters."""

import inspect

import click

from buoy._core.policies.registry import Listed, listed, policy
from buoy.cli.render import fields_of, json_out, table, value_text
from buoy.cli.spec import JSON

__all__ = ["policies"]


@click.command(short_help="List all policies, presets and their parameters.")
@click.argument("names", metavar="[NAME]...", nargs=-1)
@JSON
def policies(names: tuple[str, ...], *, as_json: bool) -> None:
    """List the policies and presets, or those named, with parameters and defaults."""
    rows = _chosen(names)
    if as_json:
        json_out({"policies": [fields_of(row) for row in rows]})
        return
    if names:
        for row in rows:
            click.echo(f"{row.name}: {row.summary}")
    table(
        "",
        ("name", "from", "parameters and defaults"),
        [(row.name, row.source, _parameters(row)) for row in rows],
    )


def _chosen(names: tuple[str, ...]) -> list[Listed]:
    rows = {row.name: row for row in listed()}
    for name in names:
        if name not in rows:
            policy(name)  # raises, with a guess at what was meant
    return [rows[name] for name in names or rows]


def _parameters(row: Listed) -> str:
    return ", ".join(
        f"{name}={value_text(value)}"
        for name, value in row.parameters.items()
        if value is not inspect.Parameter.empty
    )
