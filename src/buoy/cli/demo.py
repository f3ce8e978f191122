"""`buoy demo`: train small models in FP32 and FP16, side by side, and show it."""

import click

from buoy.cli.spec import JSON, made, policy_option

__all__ = ["demo"]

_SEEDS = 3
_CTRL_C = 130  # as shells have it


@click.command(short_help="Train small models in FP32 and FP16, side by side.")
@click.argument("names", metavar="[WORKLOAD]...", nargs=-1)
@policy_option("Train with this policy too, e.g. backoff:init_scale=2**10. Repeatable.")
@click.option("--steps", type=click.IntRange(1), help="Train for this many steps only.")
@click.option(
    "--seeds", type=click.IntRange(1, 99), default=_SEEDS, show_default=True,
    help="Train each with this many seeds.",
)  # fmt: skip
@click.option(
    "-o",
    "--out",
    default="buoy-demo.html",
    show_default=True,
    metavar="HTML",
    help="Where to write the report.",
)
@JSON
def demo(
    names: tuple[str, ...],
    *,
    specs: tuple[str, ...],
    steps: int | None,
    seeds: int,
    out: str,
    as_json: bool,
) -> None:
    """Train small models in FP32 and FP16, side by side, and write a report.

    WORKLOAD is one of field-1, field-1e-3, field-1e-5, jump-down, jump-up, bandit,
    bce, letters, or the beginning of several names (field).  Default: all of them.

    Each is trained in FP32, and in FP16 without scaling, with three fixed scales, with
    torch's GradScaler and with Buoy's Headroom.  Ctrl-C stops early and reports the
    results so far.
    """
    extra = {spec: made(spec) for spec in specs}
    from buoy.cli.show import show  # noqa: PLC0415 - imports torch

    if not show(names, extra, steps=steps, seeds=seeds, out=out, as_json=as_json):
        click.get_current_context().exit(_CTRL_C)
