"""The ceiling of Headroom's scale: what overflows teach that gradients do not show.

An activation gradient may overflow while the weights' gradients are far from it, and
tasks that alternate need the scale of the largest.  The ceiling finds such a limit from
the overflows alone, and tries it again only rarely.
"""

from typing import NamedTuple

from buoy._core.ops import Ops, Scalar

__all__ = [
    "FORGET",
    "LEAST",
    "RETREAT",
    "UNIT",
    "UNSET",
    "Ceiling",
    "Found",
    "moved",
    "retreat",
]

# Logarithms are to base 2, in bits: 1 bit is a factor of two (a binade). They are
# held as whole numbers of 1/1024 bit, so that float32 and float64, fused or not,
# compute the same state: all stay below 2^24.
UNIT = 1024.0
UNSET = -(2.0**21)

RETREAT = 8.0  # bits down on overflow, up on zeros: one low step beats two lost

# Patience and hold are steps.
HIT, MISSED = 2.0, 4.0  # bits down at the ceiling: if it has risen, if it has not
LEAST, LONGER, MOST = 4.0, 32.0, 2048.0  # hold: at first, its growth, its limit
BELOW = 1.0  # bits from a scale that failed to one that a new level allows, at least
NEAR = 3.0 * UNIT  # gradients that explain overflows count as equal within this
HASTE = 4.0  # patience falls by this factor when the ceiling rises
SOON = 16.0  # steps in which an overflow at a held ceiling is no coincidence
SINGLE = 1.0  # bits down at a ceiling that held for longer: it may be a bad batch
RECENT = 40.0  # steps after an overflow in which another one is at a free ceiling
FORGET = 512.0  # steps after an overflow in which the hold is remembered
KEEP = 1.0  # and for as long as the scale is at the ceiling; 0: not then
PROVEN = 2048.0  # a hold that counts every overflow as one at the ceiling


class Ceiling(NamedTuple):
    """The ceiling's part of the state; the fields are those of `HeadroomState`."""

    ceiling: Scalar
    patience: Scalar
    waited: Scalar
    hold: Scalar
    mark: Scalar
    since: Scalar


class Found(NamedTuple):
    """What the ceiling learns from a step."""

    used: Scalar  # log2 of its scale
    k: Scalar  # what the gradients suggest for the next
    finite: Scalar
    overflows: Scalar  # in a row, this step included
    cause: Scalar  # the gradient that explains the last overflow, or UNSET
    full: Scalar  # the learned margin is as wide as it may be
    failing: Scalar  # log2 of the scale of the last overflow


def moved(
    before: Ceiling, found: Found, bounds: tuple[float, float], ops: Ops
) -> tuple[Scalar, Ceiling]:
    """Return log2 of the next scale, at most the ceiling, and the next ceiling."""
    where, floor = ops.where, ops.floor
    used, k, finite, overflows, cause, full, failing = found
    first, row = overflows == 1.0, overflows > 1.0
    # A ceiling without patience is free: it rises at every step.
    free = before.patience <= 1.0
    at = used >= before.ceiling
    # One overflow at a height that held for a while proves little: it may be a NaN.
    lately = before.since < FORGET
    recent = (before.since < RECENT) | (lately & (full | (before.hold >= PROVEN)))
    fresh = where(free, recent, at & (before.waited < SOON))
    hit = first & fresh
    missed = first & (before.since < SOON) & (before.patience > 1.0)
    # How long it holds: longer if the cause is the same, and recent.
    explained = cause > UNSET
    again = explained & (cause < before.mark + NEAR) & (cause > before.mark - NEAR)
    known = lately & (again | (cause <= UNSET))
    hold = where(known, before.hold, LEAST)
    hold = where(again | hit | (overflows == 2.0), hold * LONGER, hold)
    hold = where(hold < MOST, hold, MOST)
    # Finite steps at the ceiling raise it.
    waited = before.waited + where(finite & (at | free), 1.0, 0.0)
    rises = finite & (waited >= before.patience)
    patience = where(rises, floor(before.patience / HASTE), before.patience)
    level = where(k < failing - BELOW, k, failing - BELOW)
    ceiling = where(explained, level, before.ceiling + where(rises, 1.0, 0.0))
    # An overflow lowers it: far to search from there, little where it was right.
    back = where(missed, MISSED, where(hit, HIT, retreat(overflows, ops)))
    low = _within(used - back, bounds, ops)
    lowers = row | hit | missed | (first & free)
    single = first & at & (used <= ceiling)
    ceiling = where(single, used - SINGLE, ceiling)
    ceiling = where(lowers, low, ceiling)
    patience = where(row, floor(patience / 2.0), patience)
    patience = where(hit | explained, hold, patience)
    high = bounds[1] + 1.0
    ceiling = where(ceiling < high, ceiling, high)
    k = where(finite, where(k < ceiling, k, ceiling), low)
    since = where(finite, before.since + 1.0, 0.0)
    oldest = where(at, FORGET - KEEP, FORGET)
    return _within(k, bounds, ops), Ceiling(
        ceiling,
        where(patience > 1.0, patience, 1.0),
        where(rises | explained | hit | row, 0.0, waited),
        hold,
        where(explained, cause, before.mark),
        where(since < oldest, since, oldest),
    )


def retreat(overflows: Scalar, ops: Ops) -> Scalar:
    """Return the bits down after so many overflows in a row: 8, 16, 32, then 64."""
    return RETREAT * ops.exp2(ops.where(overflows < 4.0, overflows - 1.0, 3.0))


def _within(k: Scalar, bounds: tuple[float, float], ops: Ops) -> Scalar:
    """Clamp an exponent to the bounds of the scale."""
    lowest, highest = bounds
    k = ops.where(k < highest, k, highest)
    return ops.where(k > lowest, k, lowest)
