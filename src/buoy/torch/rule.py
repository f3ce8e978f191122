"""How the scale moves: torch's kernel for torch's rule, the policy's own otherwise.

`Classic` is what `torch.amp.GradScaler` does, with a floor under it; it runs torch's
kernel, which the contract suite holds equal to `Backoff` step for step.  `Governed`
runs any policy: on plain numbers while the host knows what was found anyway, on the
device from the first step on which it does not.
"""

import math
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from buoy._backends import torch as backend
from buoy._core.backoff import Backoff
from buoy._core.codec import decode, encode
from buoy._core.errors import PolicyError, ScaleCollapsedError
from buoy._core.ops import PLAIN, single
from buoy._core.policy import Policy
from buoy._core.quirks import Quirks
from buoy._core.state import Seen, map_state
from buoy.torch import survey

if TYPE_CHECKING:
    from buoy.torch.contract import Contract

__all__ = ["FLOAT32_MAX", "MIN_SCALE", "Classic", "Evidence", "Governed"]

FLOAT32_MAX = (2.0 - 2.0**-23) * 2.0**127
MIN_SCALE = 2.0**-24
_NEVER = 2**31 - 1


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
        self._known: tuple[float, int, int, int] | None = None

    def known(self, scaler: "Contract") -> float | None:
        """Tell the scale, if the host knows it without asking."""
        kept, scale, tracker = self._known, scaler._scale, scaler._growth_tracker
        if kept is None or scale is None or tracker is None:
            return None
        if (scale._version, tracker._version) != kept[2:]:
            self._known = None
            return None
        return kept[0]

    def learn(self, scaler: "Contract", scale: float, tracker: int) -> None:
        """Note the scale and the counter that the tensors now hold."""
        held, count = scaler._scale, scaler._growth_tracker
        if held is not None and count is not None:
            self._known = (scale, tracker, held._version, count._version)

    def start(self, scaler: "Contract") -> None:
        """Note what the tensors were just made of."""
        count = scaler._init_growth_tracker
        self.learn(scaler, single(scaler._init_scale), count)

    def foresee(self, scaler: "Contract", loss: torch.Tensor) -> None:
        """Look away: this rule learns from overflows only."""

    def admit(self, value: float) -> None:
        """Stretch assumed bounds around a scale that was set by hand."""
        if not self.fixed:
            self.low = min(self.low, value) if value > 0 else self.low
            self.high = max(self.high, value)

    def assign(self, scaler: "Contract", value: float | torch.Tensor) -> None:
        """Go on from this scale, which the scaler's tensor holds already."""
        count = self._known[1] if self._known is not None else None
        self._known = None
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
        before, count = self._known[:2] if self._known else (math.nan, 0)
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
        self._known = (after, count, scale._version, tracker._version)

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


class Governed:
    """Move the scale as a policy says."""

    def __init__(self, policy: Policy) -> None:
        self.rule = policy
        self.state: Any = policy.init()
        self.wants = policy.wants
        self.on_device = False
        self.fresh = True  # `foresee` has not yet seen this iteration's loss

    def known(self, scaler: "Contract") -> float | None:
        """Tell the scale, if the host knows it without asking."""
        del scaler
        scale = self.state.scale
        return None if isinstance(scale, torch.Tensor) else float(scale)

    def start(self, scaler: "Contract") -> None:
        """Take over the scale that the tensor was just made of."""
        known = self.known(scaler)
        if known is None or single(known) != single(scaler._init_scale):
            self.assign(scaler, scaler._init_scale)

    def assign(self, scaler: "Contract", value: float | torch.Tensor) -> None:
        """Go on from this scale, set by hand."""
        if isinstance(value, torch.Tensor):
            value = backend.read([value])[0]
        self.restore(scaler, self.begun_at(float(value)))

    def begun_at(self, value: float) -> Any:
        """Make the state of a policy that starts at this scale, or close below it."""
        for start in (value, 2.0 ** math.floor(math.log2(value))):
            try:
                policy: Any = replace(self.rule, init_scale=start)  # type: ignore[type-var]
                return policy.init()
            except (TypeError, PolicyError):  # not a field of it, or out of its bounds
                continue
        return self.rule.init()

    def foresee(self, scaler: "Contract", loss: torch.Tensor) -> None:
        """Show the policy this iteration's first loss before it is scaled."""
        if not self.fresh or "loss" not in self.wants or scaler._scale is None:
            return
        self.fresh = False
        number = loss.detach().float()
        seen = None if self.on_device else survey.seen_by_host(number)
        if seen is not None:
            self.state = self.rule.foresee(self.state, seen, ops=PLAIN)
            self._write(scaler._scale)
            return
        self._lift(scaler._scale.device)
        number = number.to(scaler._scale.device, non_blocking=True)
        self._keep(self.rule.foresee(self.state, number, ops=backend.ops()))
        scaler._scale.copy_(self.state.scale)

    def move(self, scaler: "Contract", evidence: Evidence) -> None:
        """Take what was seen; leave the next scale in the scaler's tensor."""
        self.fresh = True
        if evidence.finite is None or self.on_device:
            self._move_on_device(scaler, evidence)
        else:
            self._move_on_host(scaler, evidence, finite=evidence.finite)

    def _move_on_host(
        self, scaler: "Contract", evidence: Evidence, *, finite: bool
    ) -> None:
        size = evidence.amax_read
        seen = Seen(
            finite=finite,
            amax_log2=None if size is None else PLAIN.log2(size),
            underflow=evidence.underflow_read,
        )
        before = self.state.scale
        try:
            self.state = self.rule.update(self.state, seen, ops=PLAIN)
        except ScaleCollapsedError as error:
            self.state = error.state if error.state is not None else self.state
            raise
        finally:
            if self.state.scale != before and scaler._scale is not None:
                self._write(scaler._scale)

    def _move_on_device(self, scaler: "Contract", evidence: Evidence) -> None:
        if scaler._scale is None:
            return
        self._lift(scaler._scale.device)
        seen = Seen(
            finite=evidence.found == 0,
            amax_log2=None if evidence.amax is None else torch.log2(evidence.amax),
            underflow=evidence.underflow,
        )
        self._keep(self.rule.update(self.state, seen, ops=backend.ops()))
        scaler._scale.copy_(self.state.scale)

    def _keep(self, state: Any) -> None:
        """Take a state over in the width that the policy declares, step after step."""
        precision, cast = self.rule.precision, backend.ops().cast
        self.state = map_state(
            lambda x: cast(x, precision) if x.is_floating_point() else x, state
        )

    def restore(self, scaler: "Contract", state: Any) -> None:
        """Go on from a saved state, of plain numbers."""
        self.state = state
        self.fresh = True
        if scaler._scale is None:
            return
        self._write(scaler._scale)
        if self.on_device:
            self._lift(scaler._scale.device)

    def _write(self, scale: torch.Tensor) -> None:
        # Scalers that keep a Python float may leave float32's range.
        scale.fill_(min(self.state.scale, FLOAT32_MAX))

    def unbound(self) -> "Governed":
        """Make a copy whose state is of plain numbers, for a pickle."""
        other = Governed(self.rule)
        other.state = decode(encode(self.state))
        return other

    def _lift(self, device: torch.device) -> None:
        self.on_device = True
        if isinstance(self.state.scale, torch.Tensor):
            return
        lifted = {
            field.name: backend.lift(value, self.rule.precision, device)
            for field in fields(self.state)
            if (value := getattr(self.state, field.name)) is not None
        }
        self.state = replace(self.state, **lifted)

    def admit(self, value: float) -> None:
        """Leave bounds to the policy, which applies them at its next move."""

    def policy(self, scaler: "Contract") -> Policy:
        """Give the policy."""
        del scaler
        return self.rule
