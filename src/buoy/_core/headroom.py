"""Placeholder until the measured policy lands."""

from buoy._core.backoff import Backoff as Headroom
from buoy._core.backoff import BackoffState as HeadroomState

__all__ = ["Headroom", "HeadroomState"]
