"""Judge a run in a few sentences, and say what to do."""

import math
from typing import Literal, NamedTuple

from buoy._core.verdicts import VERDICTS, Verdict
from buoy._core.watch import PATIENCE, Stuck, count_stuck
from buoy.report.facts import Facts

__all__ = ["Level", "Summary", "bits", "power", "share", "summary"]

Level = Literal["healthy", "look", "trouble"]

_OFTEN = 0.02  # of the steps after the warm-up
_LOSSY = 0.25  # of the nonzero gradients: below the smallest normal number
_SPARE = 6.0  # bits of headroom that are worth using


class Summary(NamedTuple):
    """The judgement of a run: a level, a headline and some sentences."""

    level: Level
    headline: str
    sentences: tuple[str, ...]


def summary(found: Facts) -> Summary:
    """Judge a run by its figures; the worst finding gives the headline.

    Example:
        >>> from buoy.report.facts import sum_up
        >>> from buoy.trace import Recording, Row
        >>> rows = [Row(i, 2.0**16, True, amax=0.25, time=i) for i in range(100)]
        >>> summary(sum_up(Recording("run.buoy", rows=rows))).headline
        'Healthy: nothing was skipped'
    """
    if not found.steps:
        return Summary("look", "Nothing was recorded yet", ())
    findings = [
        *_stuck(found),
        *_grave(found),
        *_often(found),
        *_lossy(found),
        *_clipped(found),
        *_end(found),
    ]
    if not findings:
        return Summary("healthy", f"Healthy: {_calm(found)}", _about(found))
    findings.sort(key=lambda finding: finding.level != "trouble")
    worst = findings[0]
    sentences = tuple(finding.sentences for finding in findings)
    return Summary(worst.level, worst.headline, (*sentences, *_about(found)))


class _Finding(NamedTuple):
    """One thing that is not as it should be."""

    level: Level
    headline: str
    sentences: str


def _stuck(found: Facts) -> list[_Finding]:
    skips = count_stuck(found.row, found.recent_skips, found.recent)
    if skips is None and not found.idle:
        return []
    stuck = Stuck(
        *(skips or (0, 0)),
        scale=found.last_scale,
        verdict=next(iter(found.verdicts), Verdict.APPLIED),
        zeros=0 if skips else found.zeros,
    )
    what = f"{stuck.what[0].upper()}{stuck.what[1:]}. {stuck.why}"
    no_progress = "training makes no progress" if skips else "nothing is learned"
    return [_Finding("trouble", f"Stuck: {no_progress}", what)]


def _grave(found: Facts) -> list[_Finding]:
    """Name the skips that ask for action."""
    findings: list[_Finding] = []
    said = "".join(finding.sentences for finding in _stuck(found))
    for verdict, count in found.verdicts.items():
        meaning = VERDICTS[verdict]
        if meaning.normal or not meaning.remedy:
            continue
        what = f"{_steps(count)} skipped as {verdict.value}."
        if meaning.sentences not in said:  # once is enough
            what += f" {meaning.sentences}"
        level: Level = "trouble" if meaning.grave else "look"
        findings.append(_Finding(level, f"Look into {verdict.value}", what))
    return findings


def _often(found: Facts) -> list[_Finding]:
    later = found.skipped - found.warm_up_skips
    part = later / max(found.steps, 1)
    if part <= _OFTEN or found.row >= PATIENCE or found.idle:
        return []
    what = (
        f"{_steps(later)} skipped after the warm-up, {share(part)} of all. The scale "
        'often exceeds what the gradients allow. `policy="headroom"`, a longer '
        "growth interval or clipping would skip fewer steps."
    )
    return [_Finding("look", "Many steps are skipped", what)]


def _lossy(found: Facts) -> list[_Finding]:
    seen = found.shares
    if seen is None or not seen.subnormal > _LOSSY * (1.0 - seen.zero):
        return []
    worst = next((x for x in found.layers if x.subnormal > _LOSSY), None)
    where = f", most in `{worst.name}`" if worst is not None else ""
    what = (
        f"{share(seen.subnormal)} of the gradients are below FP16's smallest normal "
        f"number and {share(seen.zero)} are zero{where}."
    )

    spare = found.headroom
    if spare is not None and spare > _SPARE:
        exponent = math.floor(math.log2(found.last_scale) + spare - 1.0)
        what += (
            f" There are {bits(spare)} of headroom above them: a scale of 2^{exponent} "
            'would fit, and `policy="headroom"` finds it without settings.'
        )
    else:
        what += (
            " A larger scale would overflow: the layers need different scales. "
            "Keep the worst in FP32, or give each block its own scale, as "
            "`examples/local_scales.py` of Buoy's repository does."
        )
    return [_Finding("look", "Gradients underflow", what)]


def _clipped(found: Facts) -> list[_Finding]:
    seen = found.clipped
    if seen is None:
        return []
    if not seen.certain:
        what = (
            "The scaled gradients have the same size in nearly every step, a round "
            "number. If they are clipped before they are divided by the scale, the "
            f"threshold is {seen.scale:g} times too low, and nothing is learned: clip "
            "after unscaling."
        )
        return [_Finding("look", "The gradients may be clipped while scaled", what)]
    where = "" if seen.step is None else f", noticed in step {seen.step}"
    what = (
        "Gradients were clipped while they were still multiplied by the scale"
        f"{where}: the threshold is {seen.scale:g} times too low, and the weights "
        "hardly move. Clip after unscaling: `scaler.clip_grad_norm_(optimizer, "
        "max_norm)`, or in JAX `loss_scaled(inner, max_norm=...)`."
    )
    return [_Finding("trouble", "Gradients were clipped while scaled", what)]


def _end(found: Facts) -> list[_Finding]:
    loss = found.last_loss
    if loss is None or math.isfinite(loss):
        return []
    what = f"The last loss that was recorded is {loss}."
    return [_Finding("trouble", "The loss is not finite", what)]


def _calm(found: Facts) -> str:
    if not found.skipped:
        return "nothing was skipped"
    if found.skipped == found.warm_up_skips:
        return f"{_steps(found.skipped)} skipped, all while warming up"
    return f"{_steps(found.skipped)} skipped, {share(found.skipped_share)} of all"


def _about(found: Facts) -> tuple[str, ...]:
    if found.low_scale == found.high_scale:
        went = f"was {power(found.last_scale)}"
    else:
        went = f"went from {power(found.first_scale)} to {power(found.last_scale)}"
    lost = f"{found.skipped:,} of {found.steps:,} steps were skipped"
    said = [f"{lost}; the scale {went}."]
    if found.headroom is not None:
        least = max(found.least_headroom or 0.0, 0.0)
        said.append(
            f"The largest gradient stayed {bits(found.headroom)} below the limit "
            f"(median), {bits(least)} at the closest."
        )
    seen = found.shares
    if seen is not None:
        said.append(
            f"In the last histograms {share(seen.zero)} of the gradients were 0 and "
            f"{share(seen.subnormal)} subnormal."
        )
    if found.lost:
        said.append(f"{found.lost:,} rows were lost: the disk was too slow.")
    if not found.ended:
        said.append("The run is still going or was killed: its file was not closed.")
    return tuple(said)


def _steps(count: int) -> str:
    return "1 step was" if count == 1 else f"{count:,} steps were"


def power(scale: float) -> str:
    """Format a scale, as a power of two if it is one.

    Example:
        >>> power(65536.0), power(1000.0), power(0.0)
        ('2^16', '1000', '0')
    """
    if not 0.0 < scale < math.inf:
        return f"{scale:g}"
    log2 = math.log2(scale)
    return f"2^{log2:.0f}" if log2.is_integer() else f"{scale:.4g}"


def bits(value: float | None) -> str:
    """Write a distance in bits; zero has no sign.

    Example:
        >>> bits(3.25), bits(-0.04), bits(None)
        ('3.2 bits', '0.0 bits', '-')
    """
    return "-" if value is None else f"{round(value, 1) + 0.0:.1f} bits"


def share(value: float) -> str:
    """Write a share in percent.

    Example:
        >>> share(0.5), share(0.00012), share(0.0)
        ('50 %', '0.012 %', '0 %')
    """
    percent = 100.0 * value
    if 0.0 < percent < 0.001:
        return "< 0.001 %"
    digits = 2 if percent < 10 else 3
    return f"{percent:.{digits}g} %"
