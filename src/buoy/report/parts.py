"""The parts of a page that are text: summaries, tables, lists."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape

from buoy._core.errors import BuoyError
from buoy._core.policies.policy import Policy
from buoy._core.replay.compare import Replayed, replay_with_oracle
from buoy._core.verdicts import VERDICTS, Verdict
from buoy.diagnose.estimate import estimate_underflow
from buoy.report.facts import Facts, Layer, is_finite
from buoy.report.markup import Cell, chip, details, table, tiles
from buoy.report.run import Run
from buoy.report.theme import DASHES, RUNS
from buoy.report.words import Summary, bits, power, share
from buoy.trace.replayable import replayable

__all__ = [
    "Policies",
    "about",
    "comparison",
    "judgement",
    "key",
    "layer_table",
    "other_policies",
    "skips",
]

Policies = Mapping[str, str | Policy] | Iterable[str | Policy]

_USUAL = ("headroom", "torch", "megatron")
_LISTED = 500  # skips in words; the chart has all
_OPENED = 12  # skips up to which their list is shown at once
_OFFENDERS = 12  # tensors that are named as not finite
_ESTIMATED = 200  # tensors, the worst: an estimate takes milliseconds
_LATEST = 4e9  # seconds since 1970 that are taken for a date, in the year 2096
_LONGEST = 300  # characters of a fact of the file
_NOTHING = "not measured"


def judgement(run: Run, found: Facts, said: Summary, *, level: int = 2) -> str:
    """Return the judgement of a run, with its figures."""
    sentences = "".join(f"<li>{_marked(sentence)}</li>" for sentence in said.sentences)
    note = f'<p class="note">{escape(run.note)}</p>' if run.note else ""
    title = f"<h{level}>{escape(run.label)}</h{level}>" if level > 2 else ""
    return (
        f'<section class="verdict {said.level}" data-run="{escape(run.label)}">'
        f'{title}{chip(said.level)}<p class="headline">{escape(said.headline)}</p>'
        f"{note}<ul>{sentences}</ul>{_tiles(found)}</section>"
    )


def _marked(text: str) -> str:
    """Escape, and show text between backticks as code."""
    parts = escape(text).split("`")
    return "".join(
        f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts)
    )


def _tiles(found: Facts) -> str:
    subnormal = _NOTHING if found.shares is None else share(found.shares.subnormal)
    return tiles(
        [
            ("steps", "steps", f"{found.steps:,}"),
            ("skipped", "skipped", f"{found.skipped:,}"),
            ("skipped_share", "of all steps", share(found.skipped_share)),
            ("scale", "scale at the end", power(found.last_scale)),
            ("headroom", "headroom, median", bits(found.headroom)),
            ("zero", "gradients zero", _zero(found)),
            ("subnormal", "gradients subnormal", subnormal),
            ("loss", "last loss", _number(found.last_loss)),
        ]
    )


def _zero(found: Facts) -> str:
    """Return the share of zeros; the norm of every step outweighs a rare look."""
    if found.idle:
        return "all: nothing is learned"
    return _NOTHING if found.shares is None else share(found.shares.zero)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def comparison(runs: Sequence[tuple[Run, Facts, Summary]]) -> str:
    """Set several runs side by side."""
    more = list(dict.fromkeys(name for run, _, _ in runs for name in run.facts))
    columns = (
        "run", "result", *more, "last loss", "steps", "skipped", "scale", "headroom",
        "zero", "subnormal",
    )  # fmt: skip
    rows = []
    for i, (run, found, said) in enumerate(runs):
        zero = None if found.shares is None else found.shares.zero
        subnormal = None if found.shares is None else found.shares.subnormal
        rows.append(
            [
                Cell(_swatch(i) + escape(run.label), run.label, markup=True),
                Cell(chip(said.level), said.level, markup=True),
                *(Cell(run.facts.get(name, "-")) for name in more),
                Cell(_number(found.last_loss), found.last_loss),
                Cell(f"{found.steps:,}", found.steps),
                Cell(f"{found.skipped:,}", found.skipped),
                Cell(power(found.last_scale), found.last_scale),
                Cell(bits(found.headroom), found.headroom),
                _share_cell(zero),
                _share_cell(subnormal),
            ]
        )
    return table("compare", columns, rows, text=2, caption="The runs compared")


def key(runs: Sequence[Run]) -> str:
    """Return the key to the lines of several runs; nothing where there is one."""
    if len(runs) < 2:
        return ""
    named = "".join(
        f"<span>{_swatch(i)}{escape(run.label)}</span>" for i, run in enumerate(runs)
    )
    return f'<p class="key">{named}</p>'


def _swatch(index: int) -> str:
    """Draw a short line in a run's colour and dash; CSS has three dashes."""
    dash = DASHES[index % len(DASHES)]
    style = dash if dash in ("solid", "dashed") else "dotted"
    return (
        f'<span class="swatch" style="border-top-style:{style};'
        f'border-top-color:var(--run-{index % len(RUNS)})"></span>'
    )


def _share_cell(value: float | None) -> Cell:
    if value is None:
        return Cell("-", -1.0)
    return Cell(share(value), f"{value:.6g}", bar=value)


def layer_table(run: Run, found: Facts, name: str) -> str:
    """List every tensor, those that lose most first."""
    if not found.layers:
        return '<p class="soft">No histograms were recorded.</p>'
    lost = _lost(run, found)
    columns = (
        "tensor", "elements", "zero", "lost", "subnormal", "headroom", "overflows",
    )  # fmt: skip
    rows = [_layer(layer, lost.get(layer.name)) for layer in found.layers]
    return table(name, columns, rows, caption="Tensors and what they lose")


def _layer(layer: Layer, lost: float | None) -> list[Cell]:
    """Return the row of a tensor; one that was only named by a skip has no shares."""
    measured = layer.size > 0
    name = f'<span class="name-of">{escape(layer.name)}</span>'
    headroom = "" if layer.headroom is None else layer.headroom
    return [
        Cell(name, layer.name, markup=True),
        Cell(f"{layer.size:,}" if measured else "-", layer.size),
        _share_cell(layer.zero if measured else None),
        _share_cell(lost),
        _share_cell(layer.subnormal if measured else None),
        Cell(bits(layer.headroom), headroom),
        Cell(f"{layer.offences:,}", layer.offences),
    ]


def _lost(run: Run, found: Facts) -> dict[str, float]:
    """Estimate which share of each tensor underflowed, at the last finite look."""
    if run.recording.meta.get("format", "fp16") != "fp16":
        return {}
    finite = [shot for shot in run.recording.shots if is_finite(shot)]
    latest = finite[-1].tensors if finite else {}
    return {
        layer.name: estimate_underflow(latest[layer.name]).zero
        for layer in found.layers[:_ESTIMATED]
        if layer.name in latest
    }


def skips(run: Run, found: Facts, said: Summary, name: str) -> str:
    """List the skipped steps in words, by cause and one by one.

    What a cause means is left out where the summary has said it.
    """
    if not found.skipped:
        return '<p data-skips="0">None: every step was applied.</p>'
    causes = "".join(
        f"<li><b>{verdict.value}</b>: {count:,}.{_meaning(verdict, said)}</li>"
        for verdict, count in found.verdicts.items()
    )

    places = run.rows.skipped
    missed = [run.rows[place] for place in places[-_LISTED:]]
    rows = [
        [
            Cell(f"{row.step:,}", row.step),
            Cell(row.verdict.value),
            Cell(", ".join(row.offenders) or "-", wide=True),
            Cell(power(row.scale), row.scale),
            Cell(_number(row.loss), row.loss),
        ]
        for row in missed
    ]
    columns = ("step", "why", "not finite in", "scale", "loss")
    listed = table(name, columns, rows, text=3, caption="Skipped steps")
    title = f"All {len(places):,}, one by one"
    if len(places) > _LISTED:
        title = f"The last {_LISTED} of {len(places):,}, one by one; the chart has all"
    opened = len(places) <= _OPENED
    return (
        f'<ul class="small" data-skips="{found.skipped}">{causes}</ul>'
        f"{_offenders(found)}{details(title, listed, opened=opened)}"
    )


def _meaning(verdict: Verdict, said: Summary) -> str:
    sentences = VERDICTS[verdict].sentences
    known = any(sentences in sentence for sentence in said.sentences)
    return "" if known else f" {_marked(sentences)}"


def _offenders(found: Facts) -> str:
    if not found.offenders:
        return ""
    named = ", ".join(
        f"<code>{escape(name)}</code> ({count:,})"
        for name, count in found.offenders[:_OFFENDERS]
    )
    rest = len(found.offenders) - _OFFENDERS
    more = f" and {rest} more" if rest > 0 else ""
    return f'<p class="small" id="offenders">Not finite most often: {named}{more}.</p>'


def other_policies(
    run: Run, policies: Policies, name: str, progress: Callable[[str], None]
) -> str:
    """Show what other policies would have done with these gradients."""
    try:
        trace = replayable(run.recording)
        results = replay_with_oracle(trace, policies or _USUAL, progress)
    except BuoyError as error:
        return f'<p class="soft">{escape(str(error))}</p>'
    rows = [_replayed(result) for result in results]
    columns = ("name", "skipped", "weight underflow", "mean scale", "regret, bits")
    return (
        table(name, columns, rows, caption="Other policies on this run's gradients")
        + '<p class="note">Replayed over the recorded gradients; the effect of a '
        "skipped step on later steps is not included. Regret is the mean distance from "
        "the largest power of two that would have fitted.</p>"
    )


def _replayed(result: Replayed) -> list[Cell]:
    lost = result.weight_underflow
    return [
        Cell(result.name),
        Cell(f"{result.skipped:,}", result.skipped),
        Cell("-" if lost is None else share(lost), -1.0 if lost is None else lost),
        Cell(f"2^{result.mean_scale_log2:.1f}", result.mean_scale_log2),
        Cell(f"{result.regret:.2f}", result.regret),
    ]


_ABOUT = (
    "model", "parameters", "policy", "format", "device", "world", "torch", "jax",
    "buoy", "python",
)  # fmt: skip


def about(run: Run) -> str:
    """Describe the file from its own metadata."""
    meta = run.recording.meta
    facts = [(key, meta[key]) for key in _ABOUT if key in meta]
    for key in ("started", "ended"):
        seconds = meta.get(key)
        if isinstance(seconds, (int, float)) and 0 <= seconds < _LATEST:
            date = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
            facts.append((key, date))
    rest = sorted(set(meta) - {key for key, _ in facts} - {"rank", "lost", "name"})
    facts += [(key, meta[key]) for key in rest if not isinstance(meta[key], dict)]
    lines = "".join(
        f"<dt>{escape(str(key))}</dt><dd>{escape(_shown(value))}</dd>"
        for key, value in facts
    )
    return f"<dl>{lines}</dl>"


def _shown(value: object) -> str:
    return f"{value:,}" if type(value) is int else str(value)[:_LONGEST]
