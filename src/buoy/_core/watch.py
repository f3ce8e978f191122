"""Detect training without progress: one log line per episode, one alarm if stuck.

Training is stuck if `patience` steps in a row were skipped, if more than half of the
last 4 x `patience` steps were, or if `patience` applied steps in a row were idle: their
gradients were all exactly zero, or negligibly small at a scale of 2^64, or were not
measured at a scale of 2^-24, where FP16 gradients are zero.  Front ends, report and
doctor use this definition.
"""

import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from buoy._core.errors import OptionError, StuckError, StuckWarning
from buoy._core.policies.policy import MIN_SCALE
from buoy._core.step import Row
from buoy._core.verdicts import VERDICTS, Verdict
from buoy._core.warn import warn

__all__ = [
    "PATIENCE",
    "OnStuck",
    "Stuck",
    "Watch",
    "count_stuck",
    "is_idle",
    "window_of",
]

PATIENCE = 50
_CEILING = 2.0**64  # the highest scale of `Backoff` and `Headroom`
_NOTHING = 2.0**-40  # norm of gradients that move no weight
_QUIET = 20  # clean steps between two lines, unless an episode has doubled


@dataclass(frozen=True, slots=True)
class Stuck:
    """The argument of a callable `on_stuck`.

    Example:
        >>> print(Stuck(50, 50, 1.0, Verdict.POISONED, ("w",)).what)
        the last 50 steps in a row were skipped
    """

    skipped: int  # in a row, or within the window
    window: int  # steps considered; equal to `skipped` for a row
    scale: float  # after the last of these steps
    verdict: Verdict  # `applied` where the steps were idle
    offenders: tuple[str, ...] = ()
    zeros: int = 0  # steps in a row that were idle: gradients zero, or as good as zero

    @property
    def what(self) -> str:
        """What happened, without its cause."""
        if self.zeros and self.scale >= _CEILING:
            return (
                f"the last {self.zeros:,} steps had a scale of 2^64 or more, and "
                "almost no gradients"
            )
        if self.zeros and self.scale <= MIN_SCALE:
            return (
                f"the last {self.zeros:,} steps were at the lowest scale, where FP16 "
                "gradients are 0"
            )
        if self.zeros:
            return f"the gradients of the last {self.zeros:,} steps were all exactly 0"
        if self.window > self.skipped:
            return f"{self.skipped:,} of the last {self.window:,} steps were skipped"
        return f"the last {self.skipped:,} steps in a row were skipped"

    @property
    def why(self) -> str:
        """The cause and the remedy, as sentences."""
        if self.zeros and self.scale >= _CEILING:
            return (
                "Nothing is learned. Either the gradients vanish, or they are divided "
                "by a scale that they were never multiplied by. Compute them from the "
                "scaled loss."
            )
        if self.zeros and self.scale <= MIN_SCALE:
            return (
                "Nothing is learned. Set a higher scale, also if it is static. If "
                "overflows lowered it, first find what overflowed, or go back to an "
                "earlier checkpoint."
            )
        if self.zeros:
            return (
                "Nothing is learned. Either they underflow at this scale, or the loss "
                "does not depend on the parameters. Raise the scale, and check what "
                "the loss is made of."
            )
        return VERDICTS[self.verdict].sentences

    def __str__(self) -> str:
        where = f", first in `{self.offenders[0]}`" if self.offenders else ""
        verdict = "" if self.zeros else f" Verdict {self.verdict.value}:"
        return f"{self.what}{where}; the scale is {self.scale:g}.{verdict} {self.why}"


OnStuck = Literal["warn", "raise"] | Callable[[Stuck], object]
Look = Callable[[], tuple[Verdict, tuple[str, ...]]]


def is_idle(scale: float, norm: float | None, amax: float | None) -> bool | None:
    """Return whether an applied step learned nothing; None if that is not known.

    `norm` and `amax` are those of its unscaled gradients, None if not measured.

    Example:
        >>> is_idle(2.0**16, 0.0, None), is_idle(2.0**16, 0.5, None)
        (True, False)
        >>> is_idle(2.0**-24, None, None), is_idle(2.0**16, None, None)
        (True, None)
    """
    if norm == 0.0 or amax == 0.0:
        return True
    if norm is None and amax is None:
        return True if scale <= MIN_SCALE else None
    size = norm if norm is not None else amax
    return scale >= _CEILING and size is not None and size < _NOTHING


def window_of(patience: int = PATIENCE) -> int:
    """Return the number of steps in the window for skips."""
    return 4 * patience


def count_stuck(
    streak: int, skipped: int, looked: int, patience: int = PATIENCE
) -> tuple[int, int] | None:
    """Return (skipped steps, window) if training is stuck, else None.

    `streak` steps were skipped in a row, and `skipped` of the last `looked`, which are
    at most `window_of(patience)`.

    Example:
        >>> count_stuck(streak=3, skipped=150, looked=200)
        (150, 200)
    """
    if streak >= patience:
        return streak, streak
    if looked < window_of(patience) or skipped * 2 <= looked:
        return None
    return skipped, looked


class Watch:
    """Counts applied and skipped steps.

    A front end calls `applied` or `skipped` once per step, or `note` with a row.
    Logs one line per episode of skips; warns, raises or calls back once when stuck.

    Example:
        >>> watch = Watch(lambda stuck: print(stuck.what), patience=2)
        >>> for _ in range(3):
        ...     watch.skipped(1.0, Verdict.POISONED, ("w",))
        the last 2 steps in a row were skipped
    """

    def __init__(
        self,
        on_stuck: OnStuck = "warn",
        patience: int = PATIENCE,
        *,
        logger: str = "buoy",
    ) -> None:
        if on_stuck not in ("warn", "raise") and not callable(on_stuck):
            message = (
                "`on_stuck` must be 'warn', 'raise' or a callable that takes a "
                f"`Stuck`, got {on_stuck!r}."
            )
            raise OptionError(message)
        if not isinstance(patience, int) or patience < 1:
            message = f"`patience` must be a whole number above 0, got {patience!r}."
            raise OptionError(message)
        self.on_stuck = on_stuck
        self.patience = patience
        self.steps = 0  # with a known outcome
        self.skips = 0
        self.streak = 0  # steps skipped in a row
        self.zeros = 0  # applied steps in a row that were idle
        self.found_zeros = False  # in the last step, by measuring
        self._log = logging.getLogger(logger)
        self._clean = 0  # steps since the last skip
        self._ever_clean = False
        self._episode = 0  # skips not logged yet
        self._logged = 0  # skips of the last line, and when it was
        self._logged_at = -math.inf
        self._window: deque[bool] = deque(maxlen=window_of(patience))
        self._alarmed = False
        self._verdicts: dict[Verdict, int] = {}
        self._first: tuple[str, ...] = ()  # offenders of the episode

    def note(self, row: Row, look: Look | None = None) -> None:
        """Add a step's row; may warn or raise.  See `skipped` for `look`."""
        scale = row.scale if row.next_scale is None else row.next_scale
        if row.applied:
            self.applied(scale, norm=row.norm, amax=row.amax)
        else:
            self.skipped(scale, row.verdict, row.offenders, look=look)

    def applied(
        self,
        scale: float | Callable[[], float],
        *,
        norm: float | None = None,
        amax: float | None = None,
    ) -> None:
        """Add a step that was applied; may warn or raise.

        `scale` may be a function: it is called only for a message.  `norm` and `amax`
        are those of its gradients, None if they were not measured.
        """
        self.steps += 1
        self._window.append(False)
        self._clean += 1
        self.streak = 0
        if self._episode:
            self._log_episode(scale)
        self._ever_clean = True
        if self._alarmed and self._clean >= _QUIET:
            self._alarmed = False
        # A scale that only the device has is not read for this.
        idle = is_idle(1.0 if callable(scale) else scale, norm, amax)
        self.found_zeros = norm == 0.0 or amax == 0.0
        if idle:
            self.zeros += 1
            if self.zeros == self.patience:
                self._alarm(_all_zero(self.zeros, _number(scale)))
        elif idle is not None:
            self.zeros = 0

    def skipped(
        self,
        scale: float,
        verdict: Verdict,
        offenders: tuple[str, ...] = (),
        *,
        look: Look | None = None,
    ) -> None:
        """Add a step that was skipped; may warn or raise.

        `scale` is the one after the step, as in `applied`.  `look` returns a better
        verdict and the offenders, at the cost of a device read: it is called only if
        training is stuck.
        """
        self.steps += 1
        self.skips += 1
        self.streak += 1
        self._episode += 1
        self._clean = 0
        self._window.append(True)
        self._verdicts[verdict] = self._verdicts.get(verdict, 0) + 1
        self._first = self._first or offenders
        if self._alarmed:
            return
        window = self._window
        found = count_stuck(self.streak, sum(window), len(window), self.patience)
        if found is not None:
            self._alarmed = True
            if look is not None:
                verdict, offenders = look()
            self._alarm(Stuck(*found, scale, verdict, self._first or offenders))

    def _alarm(self, stuck: Stuck) -> None:
        message = f"Training is stuck: {stuck}"
        if self.on_stuck == "raise":
            raise StuckError(message, stuck.verdict)
        if callable(self.on_stuck):
            self.on_stuck(stuck)
        else:
            warn(message, StuckWarning)

    def _log_episode(self, scale: float | Callable[[], float]) -> None:
        """Log an episode that has ended."""
        if self.steps - self._logged_at < _QUIET and self._episode < 2 * self._logged:
            return  # log it together with the next one
        cause = max(self._verdicts, key=lambda verdict: self._verdicts[verdict])
        meaning = VERDICTS[cause]
        normal = meaning.normal
        after = _number(scale)
        end = f"settled at {_power(after)}"
        if after <= MIN_SCALE:
            normal = False
            end = f"fell to {_power(after)}, where FP16 gradients are 0"
        if not meaning.overflow:
            title = cause.value
            text = meaning.text
        else:
            title = "overflow" if self._ever_clean else "warm-up"
            text = "normal" if normal else f"{cause.value}, {meaning.text}"
        self._log.log(
            logging.INFO if normal else logging.WARNING,
            "%s: %d skipped, %s: %s",
            title,
            self._episode,
            end,
            text,
        )
        self._logged = self._episode
        self._logged_at = self.steps
        self._episode = 0
        self._verdicts = {}
        self._first = ()


def _all_zero(zeros: int, scale: float) -> Stuck:
    return Stuck(0, zeros, scale, Verdict.APPLIED, zeros=zeros)


def _number(scale: float | Callable[[], float]) -> float:
    return scale() if callable(scale) else scale


def _power(scale: float) -> str:
    exponent = math.log2(scale) if scale > 0 and math.isfinite(scale) else math.nan
    return f"2^{exponent:.0f}" if exponent == round(exponent, 9) // 1 else f"{scale:g}"
