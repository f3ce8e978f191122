"""A live view of a running job, for a terminal: what `buoy watch` draws."""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from buoy._core.step import Row
from buoy._core.text import printable
from buoy._core.watch import window_of
from buoy.report.facts import Facts, sum_up
from buoy.report.words import Summary, power, share, summary
from buoy.report.words import bits as bits_of
from buoy.trace.recording import Recording, load

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table
    from rich.text import Text

__all__ = ["Follower", "line", "sparkline", "view"]

_BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_PLAIN = "_.-=+*%#"
_RECENT = 20_000  # rows that are read and kept for the figures
_LOOKS = 20  # and sets of histograms
_WORST = 6  # layers that are shown
_SKIPS = 3  # that are shown, the last
_SILENT = 30.0  # seconds without a step that are worth a word
_COLOURS = {"healthy": "green", "look": "yellow", "trouble": "red"}


class Follower:
    """Read a file again and again, each time only what is new."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.steps = 0  # of the whole run
        self.skipped = 0  # of the whole run
        self.recording: Recording | None = None

    def look(self) -> bool:
        """Read on; say whether there was anything new."""
        last = self.recording
        after = last.rows[-1].step if last is not None and last.rows else -1
        looked = last.shots[-1].step if last is not None and last.shots else -1
        new = load(
            self.path,
            after=after,
            shots_after=looked,
            latest=_RECENT,
            latest_shots=_LOOKS,
        )
        steps, skipped = new.counted or (0, 0)
        self.steps += steps
        self.skipped += skipped
        if last is None:
            self.recording = new
            return True

        rows = [*last.rows, *new.rows][-_RECENT:]
        shots = [*last.shots, *new.shots][-_LOOKS:]
        changed = bool(new.rows) or new.ended != last.ended
        self.recording = replace(new, rows=rows, shots=shots)
        return changed

    def facts(self) -> Facts:
        """Sum up the recent steps; the counts are of all."""
        found = sum_up(self.recording or Recording(self.path))
        return replace(found, steps=self.steps, skipped=self.skipped)


def sparkline(
    values: Sequence[float | None], width: int = 40, *, blocks: bool = True
) -> str:
    """Draw numbers as a row of little bars, the latest on the right.

    Example:
        >>> sparkline([0.0, 1.0, 2.0, 7.0], width=4, blocks=False)
        '_.-#'
    """
    known = [v for v in values if v is not None and math.isfinite(v)]
    if not known:
        return ""
    bars = _BLOCKS if blocks else _PLAIN
    columns = min(width, len(known))
    parts = [
        known[i * len(known) // columns : (i + 1) * len(known) // columns]
        for i in range(columns)
    ]
    means = [math.fsum(part) / len(part) for part in parts]
    low = min(means)
    high = max(means)
    scale = (len(bars) - 1) / (high - low) if high > low else 0.0
    return "".join(bars[round((mean - low) * scale)] for mean in means)


def line(follower: Follower) -> str:
    """Print the state of the run in one line, if there is no terminal to draw on."""
    found = follower.facts()
    rows = follower.recording.rows if follower.recording else []
    bits = _last([row.headroom for row in rows])
    parts = [
        f"step {rows[-1].step if rows else 0}",
        f"scale {power(found.last_scale)}",
        f"skipped {found.skipped} ({share(found.skipped_share)})",
    ]
    if bits is not None:
        parts.append(f"headroom {bits_of(bits)}")
    if found.shares is not None:
        parts.append(f"zero {share(found.shares.zero)}")
        parts.append(f"subnormal {share(found.shares.subnormal)}")
    if found.last_loss is not None:
        parts.append(f"loss {found.last_loss:.4g}")
    return ", ".join(parts)


def view(
    follower: Follower, *, blocks: bool = True, now: float | None = None
) -> "Group":
    """Draw one frame, as something that rich prints."""
    from rich.console import Group  # noqa: PLC0415 - slow to import
    from rich.text import Text  # noqa: PLC0415

    recording = follower.recording or Recording(follower.path)
    found = follower.facts()
    said = summary(found)
    parts: list[RenderableType] = [
        _title(recording, found, said, time.time() if now is None else now),
        Text(said.headline, style=f"bold {_COLOURS[said.level]}"),
        _curves(recording.rows, found, blocks=blocks),
    ]
    if found.layers:
        parts.append(_layers(found))
    missed = [row for row in recording.rows if not row.applied]
    for row in reversed(missed[-_SKIPS:]):
        where = f" in {', '.join(row.offenders[:2])}" if row.offenders else ""
        what = f"skipped at {power(row.scale)}: {row.verdict}{printable(where)}"
        text = f"step {row.step:,} {what}"
        parts.append(Text(text, style="dim", overflow="fold"))
    return Group(*parts)


def _title(recording: Recording, found: Facts, said: Summary, now: float) -> "Text":
    from rich.text import Text  # noqa: PLC0415

    name = printable(Path(recording.path).name)
    text = Text.assemble((f" {said.level} ", f"reverse {_COLOURS[said.level]}"))
    text.append(f" {name}", "bold")
    text.append(f"  step {recording.rows[-1].step:,}" if recording.rows else "")
    if math.isfinite(found.seconds):
        text.append(f"  {_duration(found.seconds)}/step")
    age = now - recording.rows[-1].time if recording.rows else 0.0
    if recording.ended:
        text.append("  ended", "dim")
    elif age > _SILENT:
        text.append(f"  silent for {_duration(age)}", "yellow")
    return text


def _duration(seconds: float) -> str:
    """Write a time as people say it.

    Example:
        >>> _duration(0.0123), _duration(3.2), _duration(400.0), _duration(9000.0)
        ('12 ms', '3.2 s', '6.7 min', '2.5 h')
    """
    if seconds < 1.0:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 120.0:
        return f"{seconds:.1f} s"
    if seconds < 7200.0:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def _curves(rows: Sequence[Row], found: Facts, *, blocks: bool) -> "Table":
    from rich.table import Table  # noqa: PLC0415

    made = Table(box=None, padding=(0, 1, 0, 0), show_header=False)
    made.add_column(style="dim", no_wrap=True)
    made.add_column(justify="right", no_wrap=True)
    made.add_column(no_wrap=True)
    logs = [math.log2(row.scale) if row.scale > 0 else None for row in rows]
    bits = [row.headroom for row in rows]
    losses = [row.loss for row in rows]
    seen = found.shares
    lines = [
        ("scale", power(found.last_scale), sparkline(logs, blocks=blocks)),
        (
            "skipped",
            f"{found.skipped:,} ({share(found.skipped_share)})",
            f"{found.recent_skips} of the last {window_of()}",
        ),
        ("headroom", bits_of(_last(bits)), sparkline(bits, blocks=blocks)),
        ("loss", _number(_last(losses)), sparkline(losses, blocks=blocks)),
        ("zero", "-" if seen is None else share(seen.zero), "of the gradients"),
        ("subnormal", "-" if seen is None else share(seen.subnormal), "of them"),
    ]
    for row in lines:
        made.add_row(*row)
    return made


def _last(values: Sequence[float | None]) -> float | None:
    """Return the last value that was measured."""
    return next((value for value in reversed(values) if value is not None), None)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _layers(found: Facts) -> "Table":
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    made = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    made.add_column("worst layers", overflow="fold", min_width=20)
    for name in ("zero", "subnormal", "headroom", "overflows"):
        made.add_column(name, justify="right", no_wrap=True)
    for layer in found.layers[:_WORST]:
        known = layer.size > 0
        made.add_row(
            Text(printable(layer.name)),  # not markup: a name may hold brackets
            share(layer.zero) if known else "-",
            share(layer.subnormal) if known else "-",
            bits_of(layer.headroom),
            str(layer.offences),
        )
    return made
