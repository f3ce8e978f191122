"""Tell of skips in episodes, one line each, and raise the alarm when stuck."""

import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from buoy._core.errors import OptionError, StuckError, StuckWarning
from buoy._core.state import Verdict
from buoy.torch import aloud
from buoy.torch.verdicts import EXPLAINED

__all__ = ["OnStuck", "Stuck", "StuckWarning", "Watch"]

log = logging.getLogger("buoy.torch")

_QUIET = 20  # clean steps between two lines, unless an episode has doubled
_NORMAL = (Verdict.SCALE_TOO_HIGH, Verdict.BAD_BATCH)


@dataclass(frozen=True, slots=True)
class Stuck:
    """What a callable given as `on_stuck` is called with."""

    skipped: int  # in a row, or within the window
    window: int  # steps looked at; equal to `skipped` for a row
    scale: float
    verdict: Verdict
    offenders: tuple[str, ...]

    def __str__(self) -> str:
        run = f"{self.skipped} steps in a row were skipped"
        if self.window > self.skipped:
            run = f"{self.skipped} of the last {self.window} steps were skipped"
        where = f", first in `{self.offenders[0]}`" if self.offenders else ""
        return (
            f"{run}{where}; the scale is {self.scale:g}. Verdict {self.verdict.value}: "
            f"{EXPLAINED[self.verdict]}."
        )


OnStuck = Literal["warn", "raise"] | Callable[[Stuck], object]
Look = Callable[[], tuple[Verdict, tuple[str, ...]]]


class Watch:
    """Follow which steps were applied; speak once per episode."""

    def __init__(self, on_stuck: OnStuck, patience: int) -> None:
        if on_stuck not in ("warn", "raise") and not callable(on_stuck):
            message = (
                "`on_stuck` must be 'warn', 'raise' or a callable that takes what "
                f"happened, got {on_stuck!r}."
            )
            raise OptionError(message)
        if not isinstance(patience, int) or patience < 1:
            message = f"`patience` must be a whole number above 0, got {patience!r}."
            raise OptionError(message)
        self.on_stuck, self.patience = on_stuck, patience
        self.steps = 0  # counted here: the updates that the host knew the outcome of
        self.skipped = 0
        self.row = 0
        self._clean = 0  # since the last skip
        self._ever_clean = False
        self._episode = 0  # skips not told of yet
        self._told = 0  # skips of the last line, and when it was
        self._told_at = -math.inf
        self._window: deque[bool] = deque(maxlen=4 * patience)
        self._alarmed = False
        self._verdicts: dict[Verdict, int] = {}
        self._first: tuple[str, ...] = ()

    def applied(self, scale: Callable[[], float]) -> None:
        """Take note of a step that was applied."""
        self.steps += 1
        self._window.append(False)
        self._clean += 1
        if self.row:
            self.row = 0
        if self._episode:
            self._tell(scale)
        self._ever_clean = True
        if self._alarmed and self._clean >= _QUIET:
            self._alarmed = False

    def missed(self, scale: float, look: Look, *, late: Verdict | None = None) -> None:
        """Take note of a step that was skipped; may raise or warn.

        `look` finds verdict and culprits.  It asks the device, so a step that is heard
        of `late` comes with the verdict that travelled with it, and is looked at only
        when there is reason for alarm.
        """
        self.steps += 1
        self.skipped += 1
        self.row += 1
        self._episode += 1
        self._clean = 0
        self._window.append(True)
        verdict, offenders = look() if late is None else (late, ())
        self._verdicts[verdict] = self._verdicts.get(verdict, 0) + 1
        self._first = self._first or offenders
        stuck = None if self._alarmed else self._found_stuck()
        if stuck is not None:
            self._alarmed = True
            if late is not None:
                verdict, offenders = look()
            self._alarm(Stuck(*stuck, scale, verdict, self._first or offenders))

    def _found_stuck(self) -> tuple[int, int] | None:
        """Tell how many of how many steps were skipped, if that is too many."""
        if self.row >= self.patience:
            return self.row, self.row
        missed, looked = sum(self._window), len(self._window)
        if looked < 4 * self.patience or missed * 2 <= looked:
            return None
        return missed, looked

    def _alarm(self, stuck: Stuck) -> None:
        if self.on_stuck == "raise":
            message = f"Training is stuck: {stuck}"
            raise StuckError(message, stuck.verdict)
        if callable(self.on_stuck):
            self.on_stuck(stuck)
            return
        aloud.warn(f"Training is stuck: {stuck}", StuckWarning)

    def _tell(self, scale: Callable[[], float]) -> None:
        """Write the line of an episode that has just ended."""
        if self.steps - self._told_at < _QUIET and self._episode < 2 * self._told:
            return  # more of the same: let it add up
        cause = max(self._verdicts, key=lambda verdict: self._verdicts[verdict])
        kind = "overflow" if self._ever_clean else "warm-up"
        normal = cause in _NORMAL
        log.log(
            logging.INFO if normal else logging.WARNING,
            "%s: %d skipped, settled at %s: %s",
            kind,
            self._episode,
            _power(scale()),
            "normal" if normal else f"{cause.value}, {EXPLAINED[cause]}",
        )
        self._told, self._told_at = self._episode, self.steps
        self._episode, self._verdicts, self._first = 0, {}, ()


def _power(scale: float) -> str:
    exponent = math.log2(scale) if scale > 0 and math.isfinite(scale) else math.nan
    return f"2^{exponent:.0f}" if exponent == round(exponent, 9) // 1 else f"{scale:g}"
