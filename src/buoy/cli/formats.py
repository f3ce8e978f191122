"""`buoy formats`: what overflows, what underflows, and where."""

import click

from buoy._core.formats import FORMATS
from buoy.cli.render import json_out, table
from buoy.cli.spec import JSON

__all__ = ["formats"]


@click.command()
@JSON
def formats(*, as_json: bool) -> None:
    """List the number formats and their limits."""
    if as_json:
        rows = [
            {
                "name": row.name,
                "max": row.max,
                "smallest_normal": row.smallest_normal,
                "smallest_subnormal": row.smallest_subnormal,
                "exponent_bits": row.exponent_bits,
                "mantissa_bits": row.mantissa_bits,
                "has_inf": row.has_inf,
                "needs_scaling": row.needs_scaling,
                "summary": row.summary,
            }
            for row in FORMATS.values()
        ]
        json_out({"formats": rows})
        return
    table(
        "",
        ("format", "", "bits", "largest", "normal", "smallest", "inf", "scale?"),
        [
            (
                row.name,
                row.summary,
                f"{row.exponent_bits}+{row.mantissa_bits}",
                f"{row.max:.5g}",
                f"{row.smallest_normal:.3g}",
                f"{row.smallest_subnormal:.3g}",
                "yes" if row.has_inf else "no",
                "yes" if row.needs_scaling else "no",
            )
            for row in FORMATS.values()
        ],
        right=6,
    )
