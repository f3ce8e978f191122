"""How the scale moves by torch's rule: on plain numbers, or by torch's own kernel.

`Classic` is what `torch.amp.GradScaler` does, with a floor under it; the contract suite
holds it equal to `Backoff` step for step.  Any other policy runs in `governed`.
"""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from buoy._backends import torch as backend
from buoy._core.ops import single
from buoy._core.policies.backoff import Backoff
from buoy._core.policies.policy import Policy
from buoy._core.policies.quirks import Quirks

if TYPE_CHECKING:
    from buoy.torch.contract import Contract

__all__ = ["FLOAT32_MAX", "MIN_SCALE", "SMALLEST", "Classic", "Evidence"]

FLOAT32_MAX = (2.0 - 2.0**-23) * 2.0**127
MIN_SCALE = 2.0**-24
SMALLEST = 2.0**-127  # below it 1 / scale, in float32, is inf
_NEVER = 2**31 - 1
_NEITHER = torch.empty(0, dtype=torch.float32, device="cpu")


class Evidence(NamedTuple):
    """What an iteration showed, on the device and as far as the host knows it."""

    found: torch.Tensor  # float32 []: more than 0 if anything was not finite
    finite: bool | None = None  # None: the host did not ask
    amax: torch.Tensor | None = None  # float32 []
    amax_read: float | None = None
    underflow: torch.Tensor | None = None  # float32 []
    underflow_read: float | None = None


class Classic:
    """Grow after a quiet while, shrink on overflow, within bounds."""

    wants: frozenset[str] = frozenset()

    def __init__(self, low: float, high: float, *, fixed: bool) -> None:
        self.low, self.high = low, high
        self.fixed = fixed  # the bounds were given, not assumed
        self._value: float | None = None  # the scale, if the host knows it
        self._clean = 0  # and what the counter holds
        self._scale = self._count = _NEITHER  # the tensors that it knows
        self._versions = (0, 0)  # and how often they had been written to
        self._window: backend.Window | None = None

    def known(self, scaler: "Contract") -> float | None:
        """Tell the scale, if the host knows it without asking.  Asked all the time.

        Nobody replaced the tensors since, or wrote to them: collectives do so silently,
        so on a CPU there is a look at the value, too.
        """
        value = self._value
        if value is None:
            return None
        scale, count = self._scale, self._count
        if (
            scaler._scale is scale
            and scaler._growth_tracker is count
            and (scale._version, count._version) == self._versions
            and (self._window is None or self._window.number.value == value)
        ):
            return value
        self._value = None
        return None

    @property
    def knows(self) -> bool:
        """Whether it did when last asked."""
        return self._value is not None

    def learn(self, scaler: "Contract", scale: float, tracker: int) -> None:
        """Note the scale and the counter that the tensors now hold."""
        held, count = scaler._scale, scaler._growth_tracker
        if held is None or count is None:
            return
        if held is not self._scale:
            self._window = backend.window(held)
        self._value, self._clean = scale, tracker
        self._scale, self._count = held, count
        self._versions = (held._version, count._version)

    def start(self, scaler: "Contract") -> None:
        """Note what the tensors were just made of."""
        count = scaler._init_growth_tracker
        self.learn(scaler, single(scaler._init_scale), count)

    def foresee(self, scaler: "Contract", loss: torch.Tensor) -> None:
        """Look away: this rule learns from overflows only."""

    def configure(self, name: str, value: Any) -> None:
        """Leave it to the scaler, whose settings this rule reads at every move."""

    def admit(self, value: float) -> None:
        """Stretch assumed bounds around a scale that was set by hand."""
        if not self.fixed:
            self.low = min(self.low, value) if value > 0 else self.low
            self.high = max(self.high, value)

    def assign(self, scaler: "Contract", value: float | torch.Tensor) -> None:
        """Go on from this scale, which the scaler's tensor holds already."""
        count = None if self._value is None else self._clean
        self._value = None
        if isinstance(value, torch.Tensor):
            if scaler._scale is not None and not scaler._strict:
                scaler._scale.clamp_(self.low, self.high)
        else:
            self.admit(float(value))
            if count is not None:
                self.learn(scaler, single(float(value)), count)

    def move(self, scaler: "Contract", evidence: Evidence) -> None:
        """Take what was seen; leave the next scale in the scaler's tensors."""
        scale, tracker = scaler._scale, scaler._growth_tracker
        if scale is None or tracker is None:
            return
        if evidence.finite is not None and self.known(scaler) is not None:
            self._move_on_host(scaler, scale, tracker, finite=evidence.finite)
            return
        torch._amp_update_scale_(
            scale,
            tracker,
            evidence.found,
            scaler._growth_factor,
            scaler._backoff_factor,
            scaler._growth_interval,
        )
        scale.clamp_(self.low, self.high)

    def _move_on_host(
        self,
        scaler: "Contract",
        scale: torch.Tensor,
        tracker: torch.Tensor,
        *,
        finite: bool,
    ) -> None:
        """Do what the kernel does, on plain numbers: the tensors only follow."""
        before, count = self._value, self._clean
        if before is None:
            return
        count, after = (count + 1, before) if finite else (0, before)
        if not finite:
            after = single(before * scaler._backoff_factor)
        elif count == scaler._growth_interval:
            count, grown = 0, single(before * scaler._growth_factor)
            after = grown if math.isfinite(grown) else before
        if after != before:
            after = single(min(max(after, self.low), self.high))
            scale.fill_(after)
        tracker.fill_(count)
        self._value, self._clean = after, count
        self._versions = (scale._version, tracker._version)

    def unbound(self) -> "Classic":
        """Make a copy that knows no tensors, for a pickle."""
        return Classic(self.low, self.high, fixed=self.fixed)

    def policy(self, scaler: "Contract") -> Policy:
        """Write the rule as a policy, for replay and for reading."""
        interval = scaler._growth_interval
        return Backoff(
            init_scale=scaler._init_scale,
            growth_factor=scaler._growth_factor,
            backoff_factor=scaler._backoff_factor,
            growth_interval=interval if interval >= 1 else _NEVER,
            min_scale=self.low if self.low > 0 else 2.0**-149,
            max_scale=self.high,
            quirks=Quirks(
                arithmetic="wide",
                at_min="clamp" if self.low > 0 else "none",
                at_max="clamp" if self.high < FLOAT32_MAX else "keep",
            ),
        )
