"""`buoy tune`: the best static scale and settings, and how sure that is."""

import shutil
import textwrap
from collections.abc import Iterator
from typing import Any

import click

from buoy._core.replay.settings import Tunable
from buoy._core.replay.tune import Tuned, TunedPolicy, TunedStatic
from buoy._core.replay.tune import tune as run
from buoy.cli.render import fields_of, json_out, percent, value_text
from buoy.cli.spec import (
    FILE,
    FORMAT,
    JSON,
    chosen,
    made,
    opened,
    policy_option,
    value_of,
)

__all__ = ["tune"]

_USUAL = ("backoff",)


@click.command(short_help="Find the best static scale and policy settings.")
@FILE
@policy_option(
    "A policy to tune; parameters given with it are kept. Repeatable. [default: "
    f"{', '.join(_USUAL)}]"
)
@click.option(
    "-t",
    "--try",
    "tries",
    metavar="KEY=VALUE,...",
    multiple=True,
    help="Values of a parameter to try, instead of the usual ones. Repeatable.",
)
@click.option(
    "--max-skipped",
    metavar="SHARE",
    type=click.FloatRange(0.0, 1.0),
    default=1e-3,
    show_default=True,
    help="Share of the steps that a safe static scale may skip.",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="The seed of the resampling."
)
@FORMAT
@JSON
def tune(
    source: str,
    specs: tuple[str, ...],
    tries: tuple[str, ...],
    max_skipped: float,
    seed: int,
    number_format: str | None,
    *,
    as_json: bool,
) -> None:
    """Find the best static scale and policy settings for the trace in FILE.

    FILE may also be synthetic:KIND, as for replay.
    """
    found = run(
        opened(source, number_format),
        list(map(_tunable, specs or _USUAL)),
        tries=dict(map(_tried, tries)) or None,
        max_skipped=max_skipped,
        seed=seed,
    )
    if as_json:
        json_out(_as_dict(found))
        return
    width = max(min(shutil.get_terminal_size().columns, 80), 20)
    for paragraph in _sentences(found):
        click.echo(textwrap.fill(paragraph, width, break_on_hyphens=False))


def _tunable(spec: str) -> Tunable:
    """Distinguish a name, whose parameters stay, from a user's policy."""
    found, parameters = chosen(spec)
    return (found, parameters) if isinstance(found, str) else made(spec)


def _tried(text: str) -> tuple[str, list[Any]]:
    key, equals, values = text.partition("=")
    found = [value_of(value.strip()) for value in values.split(",") if value.strip()]
    if not key.strip() or not equals or not found:
        message = f"{text!r} is not key=value,value, e.g. growth_interval=100,500."
        raise click.BadParameter(message, param_hint="'--try'")
    return key.strip(), found


def _as_dict(found: Tuned) -> dict[str, object]:
    return {
        "trace": found.trace,
        "steps": found.steps,
        "objective": found.objective,
        "static": {**fields_of(found.static), "scale": found.static.scale},
        "policies": [fields_of(tuned) for tuned in found.policies],
    }


def _sentences(found: Tuned) -> Iterator[str]:
    yield " ".join(_of_static(found.static))
    for tuned in found.policies:
        yield ""
        yield " ".join(_of_policy(tuned, found.steps))
    yield ""
    if found.objective == "skipped+underflow":
        yield (
            "Lost: all gradients of skipped steps, and those that underflow in the "
            "others."
        )
    else:
        yield (
            "The trace has no histograms, so underflow is not known: each binade "
            "(factor of two) below the best scale counts as 0.01% of a step instead."
        )


def _of_static(best: TunedStatic) -> Iterator[str]:
    yield (
        f"Best static scale: 2^{best.exponent} ({best.scale:g}); "
        f"it would have lost {percent(best.loss)}%."
    )
    if best.lowest != best.highest:
        yield f"Scales from 2^{best.lowest} to 2^{best.highest} lose the same."
    low, high = best.interval
    chosen = f"2^{low}" if low == high else f"2^{low} to 2^{high}"
    yield (
        f"This is {best.sureness}: in {best.confidence:.0%} of the resampled traces it "
        f"is among the best, and 90% of them choose {chosen}."
    )
    if best.largest_safe is None:
        yield f"Every scale skips more than {percent(best.max_skipped)}% of the steps."
    else:
        yield (
            f"The largest scale that skips at most {percent(best.max_skipped)}% of the "
            f"steps is 2^{best.largest_safe}."
        )


def _of_policy(best: TunedPolicy, steps: int) -> Iterator[str]:
    settings = ", ".join(
        f"{key}={value_text(value)}" for key, value in best.settings.items()
    )
    if best.tried == 1:
        yield f"{best.name}: no setting to try; name some with --try."
    elif not settings:
        yield f"{best.name}: keep it as it is; it loses {percent(best.loss)}%."
    else:
        yield (
            f"{best.name}: best with {settings}; it loses {percent(best.loss)}%, "
            f"and as given {percent(best.given_loss)}%."
        )
        yield _merit(best)
    if best.tried > 1:
        others = best.alike - 1  # the best is like itself
        yield (
            f"{best.tried} settings were tried; {others} of the others are not "
            "distinguishable from the best."
        )
    if best.steps < steps:
        yield f"Only the first {best.steps} of {steps} steps were used."


def _merit(best: TunedPolicy) -> str:
    low, high = best.gain_interval
    gained = (
        "chosen on half of the trace and tested on the other, tuning gained "
        f"{percent(best.gain)}% (90%: {percent(low)} to {percent(high)}%)."
    )
    if best.sureness == "unsure":
        return f"It is not distinguishable from the given settings: {gained}"
    return f"It is better ({best.sureness}): {gained}"
