"""`buoy replay`: what other policies would have done."""

import math
from collections.abc import Iterable, Sequence

import click

from buoy._core.policies.policy import Policy
from buoy._core.replay.compare import Replayed, replay_with_oracle
from buoy._core.replay.trace import Trace
from buoy._core.text import printable
from buoy.cli.render import describe, json_out, percent, scale, stages, table
from buoy.cli.spec import FILE, FORMAT, JSON, made, opened, policy_option

__all__ = ["USUAL", "compare", "named", "replay"]

USUAL = ("headroom", "torch", "megatron")
# As the fields of `Replayed` are called.
_COLUMNS = (
    "name", "skipped", "weight\nunderflow", "activation\nunderflow", "mean\nscale",
    "final\nscale", "too\nlow", "too\nhigh",
)  # fmt: skip


@click.command(short_help="Run policies over a trace, and compare what they lose.")
@FILE
@policy_option(
    "A policy to run, with parameters, e.g. torch:init_scale=2**10; one of your own as "
    f"MODULE:CLASS or FILE.py:CLASS. Repeatable. [default: {', '.join(USUAL)}]"
)
@FORMAT
@JSON
def replay(
    source: str, specs: tuple[str, ...], number_format: str | None, *, as_json: bool
) -> None:
    """Run policies over the trace in FILE and compare what they lose.

    FILE may also be synthetic:KIND[:steps=N,seed=N], where KIND is one of stationary,
    spikes, step_up, step_down, drift_down, drift_up, saw, noise, jumps.
    """
    policies = named(specs or USUAL)
    with stages(len(policies) + 2) as begin:
        begin("Reading")
        trace = opened(source, number_format)
        results = replay_with_oracle(trace, policies, progress=begin)
    compare(trace, results, as_json=as_json)


def compare(trace: Trace, results: Sequence[Replayed], *, as_json: bool) -> None:
    """Print what the policies, and the oracle, made of the trace."""
    if as_json:
        json_out(_document(trace, results))
    else:
        _print(trace, results)


def _document(trace: Trace, results: Sequence[Replayed]) -> dict[str, object]:
    *policies, oracle = results
    return {
        "trace": {
            "name": trace.name,
            "steps": len(trace),
            "max_log2": trace.max_log2,
            "zero_log2": trace.zero_log2,
            "has_loss": trace.loss_log2 is not None,
            "has_histograms": trace.has_histograms,
        },
        "policies": [_as_dict(result) for result in policies],
        "oracle": _as_dict(oracle),
    }


def named(specs: Iterable[str]) -> dict[str, Policy]:
    """Make the policies that were typed, by what was typed."""
    found: dict[str, Policy] = {}
    for spec in specs:
        label = spec
        number = 1
        while label in found:
            number += 1
            label = f"{spec} #{number}"
        found[label] = made(spec)
    return found


def _as_dict(result: Replayed) -> dict[str, object]:
    return {
        "name": result.name,
        "policy": None if result.policy is None else describe(result.policy),
        "steps": result.steps,
        "skipped": result.skipped,
        "weight_underflow": result.weight_underflow,
        "activation_underflow": result.activation_underflow,
        "first_scale": result.first_scale,
        "final_scale": result.final_scale,
        "mean_scale": result.mean_scale,
        "mean_scale_log2": result.mean_scale_log2,
        "regret": result.regret,
        "too_low": result.too_low,
        "too_high": result.too_high,
        "collapsed_at": result.collapsed_at,
    }


def _print(trace: Trace, results: Iterable[Replayed]) -> None:
    table(
        f"{trace.name or 'trace'}: {len(trace)} steps",
        _COLUMNS,
        [_row(result) for result in results],
        right=7,
    )
    click.echo(
        "Underflow: % of the gradients of weights and activations. Too low, too high:\n"
        "mean binades (factors of two) below and above the best scale of each step."
    )
    if not trace.has_histograms:
        click.echo("The trace has no histograms, so underflow is not known.")
    for result in results:
        if result.collapsed_at is not None:
            name = printable(result.name)
            click.echo(f"{name} gave up at step {result.collapsed_at}.")


def _row(result: Replayed) -> tuple[str, ...]:
    return (
        result.name,
        str(result.skipped),
        percent(result.weight_underflow),
        percent(result.activation_underflow),
        scale(result.mean_scale_log2, 1),
        scale(math.log2(result.final_scale)),
        f"{result.too_low:.2f}",
        f"{result.too_high:.2f}",
    )
