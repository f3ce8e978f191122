"""A policy that keeps what it is told of the losses, for the tests of front ends."""

from dataclasses import dataclass

import buoy

FINITE, NOT_FINITE, UNKNOWN = 1.0, 0.0, -1.0


@dataclass(frozen=True)
class ToldState:
    """The scale, which never moves, and what the last step said of its losses."""

    scale: float
    told: float


@dataclass(frozen=True, kw_only=True)
class Told:
    """Keep `Seen.loss_finite` of the last step: FINITE, NOT_FINITE or UNKNOWN."""

    wants: frozenset = frozenset({"loss_finite"})
    precision: str = "float32"

    bounds = buoy.Bounds()

    def init(self, *, scale=None):
        """Start with nothing told."""
        return ToldState(scale=1024.0 if scale is None else scale, told=UNKNOWN)

    def foresee(self, state, loss, *, ops=None):
        """Do not look ahead."""
        del loss, ops
        return state

    def update(self, state, seen, *, ops=None):
        """Keep what was told."""
        if seen.loss_finite is None:
            return ToldState(state.scale, 0.0 * state.told + UNKNOWN)
        where = (ops or buoy.ops_of(seen.finite, state.scale)).where
        told = where(seen.loss_finite, 0.0 * state.told + FINITE, 0.0 * state.told)
        return ToldState(state.scale, told)
