"""`buoy demo`: three policies over a bundled trace."""

import click

from buoy._core.registry import policy
from buoy.cli.replay import compare
from buoy.cli.spec import JSON, opened

__all__ = ["demo"]

_POLICIES = ("none", "torch", "headroom")


@click.command(short_help="Compare three policies on a bundled trace.")
@JSON
def demo(*, as_json: bool) -> None:
    """Compare no scaling, torch's rule and headroom on a bundled trace.

    The trace was recorded from a small regression in SI units, in FP32.
    """
    from importlib.resources import as_file, files  # noqa: PLC0415 - slow to import

    with as_file(files("buoy").joinpath("data", "field.trace.json")) as path:
        trace = opened(str(path))
    compare(trace, {name: policy(name) for name in _POLICIES}, as_json=as_json)
